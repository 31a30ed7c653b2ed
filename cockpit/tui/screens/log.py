"""Screen 8: the run's log and its console output."""

from collections.abc import Sequence

from cockpit.data.store import Store
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.log.console import ConsolePanel
from cockpit.tui.widgets.log.entries import LogPanel
from cockpit.tui.widgets.panel import Panel


class Log(RunScreen):
    """The log above the console output of the run; on a large terminal, the two are side by side."""

    NAME = "log"

    def columns(self) -> Sequence[Sequence[Panel]]:
        return ((LogPanel(),), (ConsolePanel(self.session.console),))

    def update_from(self, store: Store, tick: int) -> None:
        super().update_from(store, tick)
        self.set_class(self.session.console.folder is not None, "-output")
