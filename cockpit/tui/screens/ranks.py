"""Screen 2: one metric of every rank, the history of all ranks, and all data about one rank."""

from collections.abc import Sequence

from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.ranks.details import RankDetails
from cockpit.tui.widgets.ranks.grid import WholeGrid
from cockpit.tui.widgets.ranks.steps import RankSteps


class Ranks(RunScreen):
    """On the left, the grid of ranks above the history of all ranks (one row per rank, one column per step); on the
    right, the inspector, which shows all data about one rank."""

    NAME = "ranks"

    def columns(self) -> Sequence[Sequence[Panel]]:
        selection = self.session.selection
        return (WholeGrid(selection), RankSteps(selection)), (RankDetails(selection),)

    async def action_open(self) -> None:
        """Show the inspector and give it the focus."""
        self._current = "rank"
        self._arrange()
        self._panels["rank"].focus()

    async def action_back(self) -> None:
        """Return from the inspector to the grid, or from the grid to the previous screen."""
        if self._current != "ranks" and not self._zoomed:
            self._current = "ranks"
            self._arrange()
            self._panels["ranks"].focus()
        else:
            await super().action_back()
