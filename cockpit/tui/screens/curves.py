"""Screen 6: metrics over the steps of the run."""

from collections.abc import Sequence

from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.metric_curve import LOSS, THROUGHPUT, CurvePanel
from cockpit.tui.widgets.panel import Panel


class Curves(RunScreen):
    """Curves of the run's metrics."""

    NAME = "curves"

    def columns(self) -> Sequence[Sequence[Panel]]:
        return ((CurvePanel(LOSS), CurvePanel(THROUGHPUT)),)
