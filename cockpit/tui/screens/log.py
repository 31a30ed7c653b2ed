"""Screen 8: the run's log."""

from collections.abc import Sequence

from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.events import EventsPanel
from cockpit.tui.widgets.panel import Panel


class Log(RunScreen):
    """Events, alerts and changes of the run."""

    NAME = "log"

    def columns(self) -> Sequence[Sequence[Panel]]:
        return ((EventsPanel("events"),),)
