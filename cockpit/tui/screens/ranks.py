"""Screen 2: every rank, one metric at a time."""

from collections.abc import Sequence

from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.ranks.grid import RankGrid


class Ranks(RunScreen):
    """The rank grid on the whole screen."""

    NAME = "ranks"

    def columns(self) -> Sequence[Sequence[Panel]]:
        return ((RankGrid(self.session.selection),),)
