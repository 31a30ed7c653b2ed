"""Screen 3: the timeline of a step, the comparison of the slowest step with the usual (median) step, and the bubble of
each stage.
"""

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding

from cockpit.data.history.rank_values import OWN
from cockpit.data.pipeline.pipelines import stage_count
from cockpit.data.pipeline.step_comparison import compare
from cockpit.tui.keys.screen_bindings import STEPS_KEYS
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.session import Session
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.pipeline.compare import ComparePanel
from cockpit.tui.widgets.pipeline.stages import StagesPanel
from cockpit.tui.widgets.pipeline.steps import StepsPanel
from cockpit.tui.widgets.pipeline.timeline import TimelinePanel


class Pipeline(RunScreen):
    """The timeline; below it, the step times, the comparison of the slowest step with the usual (median) step, and the
    stages."""

    NAME = "pipeline"
    SAMPLES = frozenset({"timeline"})
    NOT_MEDIUM = frozenset({"other"})
    BINDINGS: ClassVar[list[Binding]] = STEPS_KEYS

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._before: int | None = None  # the step that was selected before the slowest

    def above(self) -> Sequence[Panel]:
        selection = self.session.selection
        return TimelinePanel("timeline", selection), TimelinePanel("other", selection, other=True)

    def columns(self) -> Sequence[Sequence[Panel]]:
        selection = self.session.selection
        return (
            (StepsPanel("steps", selection), StagesPanel("stages", selection)),
            (ComparePanel("compare", selection),),
        )

    def _select(self, step: int | None) -> None:
        self.session.selection.step = step
        for panel in self._panels.values():
            if panel.drawn:
                panel.redraw()

    def action_slowest(self) -> None:
        """Select the slowest of the steps that are kept in memory. If the slowest step is already selected, return to
        the step that was selected before it."""
        selection, store = self.session.selection, self.shown
        with store.lock:
            slowest = store.phases.slowest()
        if slowest is None:
            return
        if selection.step == slowest:
            self._select(self._before)
        else:
            self._before = selection.step
            with store.lock:
                found = compare(store, slowest)
            own = next((one for one in found.growths if one.quantity == OWN), None) if found else None
            if own and found and found.cause and not own.whole:
                selection.rank = own.rank  # the rank that the comparison names
            self._select(slowest)

    def action_kept(self, by: int) -> None:
        """Select the next or previous step that is kept in memory. In a run with several stages, steps without a
        timeline are skipped if any step has one. After the newest of these steps, the screen follows the run again."""
        selection, store = self.session.selection, self.shown
        with store.lock:
            piped = stage_count(store) > 1 and store.timelines.steps
            steps = list(store.timelines.steps if piped else store.phases.steps)
        if not steps:
            return
        here = selection.step
        if by < 0:
            earlier = [step for step in steps if step < (steps[-1] if here is None else here)]
            self._select(earlier[-1] if earlier else steps[0])
        elif here is not None:
            later = [step for step in steps if step > here]
            self._select(later[0] if later else None)
