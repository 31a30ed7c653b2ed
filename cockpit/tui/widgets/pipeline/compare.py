"""Panel that compares the slowest step, or the selected step, with the usual step (medians over the kept steps)."""

from cockpit.data import format
from cockpit.data.pipeline.step_comparison import compare
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.screen_bindings import STEPS
from cockpit.tui.session import Selection
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.pipeline.verdict import comparison_lines, verdict_lines


class ComparePanel(Panel):
    """The panel that compares a step with the usual step: which times were longer, on which stage or rank, and which
    events happened at the step."""

    TOPICS = frozenset({Topic.RANKS, Topic.CURVES, Topic.PIPELINE, Topic.EVENTS, Topic.BOARD})
    TITLE = "Slowest step"
    OPENS = "ranks"
    EVERY = 4
    ACTIONS = STEPS
    HELP = (
        "The slowest kept step, or the selected one, compared with the usual step: the median of each time over steps "
        "with the same knobs. Each row shows the stage where that time grew most, and the rank with the longest time. "
        "Own time is the step time minus waiting for other ranks. If own time grew, that rank itself was slow; if only "
        "waiting grew, the cause is the network or another rank. The first step of a run is left out, because it is "
        "always slow."
    )

    def __init__(self, id: str, selection: Selection) -> None:
        super().__init__(id)
        self.selection = selection

    def choice(self) -> object:
        return self.selection.step

    def _step(self, store: Store) -> int | None:
        return store.phases.slowest() if self.selection.step is None else self.selection.step

    def title(self, store: Store) -> str:
        step = self._step(store)
        what = "Slowest kept step" if step == store.phases.slowest() else "Selected step"
        return "Slowest step" if step is None else f"{what} {format.grouped(step)} against the usual step"

    def subtitle(self, store: Store) -> str:
        found = compare(store, self._step(store))
        if found is None:
            return ""
        of = "" if found.usual.same_knobs else ", with other knobs"
        missing = store.world - found.phases.ranks
        covered = f" · {format.counted(missing, 'rank')} without a record" if missing > 0 else ""
        return f"usual: median of {format.counted(found.usual.steps, 'step')}{of}{covered}"

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        step = self._step(store)
        if step is None:
            return [StripLine().add(f"{format.MISSING} few steps are known yet", colours.dim)]
        lines = verdict_lines(store, step, width, colours)
        return [*lines, *comparison_lines(store, step, width, height - len(lines), colours)]
