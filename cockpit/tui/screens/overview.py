"""Screen 1: the diagnosis of the run, and panels that summarise its ranks, pipeline, experts, traffic, curves, knobs
and events."""

from collections.abc import Sequence

from cockpit.data.run_folders.final_summary import has_ended
from cockpit.data.store import Store
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.curves.loss_and_throughput import LOSS, THROUGHPUT, CurvePanel
from cockpit.tui.widgets.events import EventsPanel
from cockpit.tui.widgets.experts.load import ExpertLoad
from cockpit.tui.widgets.experts.missing import no_experts
from cockpit.tui.widgets.knobs import KnobSummary
from cockpit.tui.widgets.outcome import OutcomePanel
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.pipeline.overview import PipelinePanel
from cockpit.tui.widgets.ranks.grid import RankGrid
from cockpit.tui.widgets.traffic.by_axis import TrafficByAxis

ENDED = "-ended"  # class in the style sheet


class Overview(RunScreen):
    """Panels with the ranks, expert loads, traffic, events, pipeline, loss, throughput and knobs of the run and, after
    its end, with its outcome."""

    NAME = "overview"
    SAMPLES = frozenset({"experts", "timeline"})
    NOT_MEDIUM = frozenset({"throughput", "events"})  # hidden by the style sheet in the medium layout

    def columns(self) -> Sequence[Sequence[Panel]]:
        selection = self.session.selection
        return (
            (
                RankGrid(selection),
                ExpertLoad(selection),
                TrafficByAxis("traffic", selection=selection),
                EventsPanel(selection),
            ),
            (
                OutcomePanel("outcome"),
                PipelinePanel(selection),
                CurvePanel(LOSS, selection),
                CurvePanel(THROUGHPUT, selection),
                KnobSummary(selection),
            ),
        )

    def update_from(self, store: Store, tick: int) -> None:
        self.set_class(has_ended(store), ENDED)
        for name, absent in _absent(store).items():
            if absent != self.has_class(f"-no-{name}"):
                self.set_class(absent, f"-no-{name}")
                if absent and self._current == name:
                    self.action_turn(1)
        super().update_from(store, tick)

    def _reachable(self) -> list[str]:
        """The panels that can have the focus: those for which the run has data. The panel with the outcome of the run
        is among them only after the run has ended."""
        names = [name for name in super()._reachable() if not self.has_class(f"-no-{name}")]
        return [name for name in names if name != "outcome" or self.has_class(ENDED)]


def _absent(store: Store) -> dict[str, bool]:
    """By panel name, whether the run has no data for that panel; False until the first step is done."""
    begun = store.summary is not None
    return {
        "experts": no_experts(store),
        "traffic": begun and not any(summary.comm for summary in store.state.summaries[-1:]),
    }
