"""Screen 7: what the planner says about the run."""

from collections.abc import Sequence

from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.knobs import KnobSummary
from cockpit.tui.widgets.panel import Panel


class Plan(RunScreen):
    """The knobs in force."""

    NAME = "plan"

    def columns(self) -> Sequence[Sequence[Panel]]:
        return ((KnobSummary("knobs"),),)
