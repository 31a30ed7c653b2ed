"""Screen 1: the diagnosis of the run and a panel for each of its subjects."""

from collections.abc import Sequence

from cockpit.data.run_folders.final_summary import has_ended
from cockpit.data.store import Store
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.curves.loss_and_throughput import LOSS, THROUGHPUT, CurvePanel
from cockpit.tui.widgets.events import EventsPanel
from cockpit.tui.widgets.experts.load import ExpertLoad
from cockpit.tui.widgets.knobs import KnobSummary
from cockpit.tui.widgets.outcome import OutcomePanel
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.pipeline.overview import PipelinePanel
from cockpit.tui.widgets.ranks.grid import RankGrid
from cockpit.tui.widgets.traffic.by_axis import TrafficByAxis

ENDED = "-ended"  # class in the style sheet


class Overview(RunScreen):
    """The whole run at a glance."""

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
        super().update_from(store, tick)

    def _reachable(self) -> list[str]:
        """The outcome is shown only after the run has ended."""
        return [name for name in super()._reachable() if name != "outcome" or self.has_class(ENDED)]
