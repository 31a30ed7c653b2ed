"""Screen 2: every rank, one metric at a time; the history of all ranks; and everything about one rank."""

from collections.abc import Sequence

from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.ranks.details import RankDetails
from cockpit.tui.widgets.ranks.grid import WholeGrid
from cockpit.tui.widgets.ranks.steps import RankSteps


class Ranks(RunScreen):
    """The grid of ranks above their history, and the inspector beside both."""

    NAME = "ranks"

    def columns(self) -> Sequence[Sequence[Panel]]:
        selection = self.session.selection
        return (WholeGrid(selection), RankSteps(selection)), (RankDetails(selection),)

    async def action_open(self) -> None:
        """Enter shows the inspector; if it is already visible, Enter gives it the focus."""
        self._current = "rank"
        self._arrange()
        self._panels["rank"].focus()

    async def action_back(self) -> None:
        """Escape returns from the inspector to the grid, and from there to the previous screen."""
        if self._current != "ranks" and not self._zoomed:
            self._current = "ranks"
            self._arrange()
            self._panels["ranks"].focus()
        else:
            await super().action_back()
