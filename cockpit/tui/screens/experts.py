"""Screen 4: the load of each expert of each layer, and the details of one expert."""

from collections.abc import Sequence

from cockpit.data.store import Store
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.session import Session
from cockpit.tui.widgets.experts.details import ExpertDetails
from cockpit.tui.widgets.experts.map import ExpertMap
from cockpit.tui.widgets.experts.missing import no_experts
from cockpit.tui.widgets.panel import Panel


class Experts(RunScreen):
    """The map of all experts, above the details of one expert. For a dense model, the details panel is hidden."""

    NAME = "experts"
    SAMPLES = frozenset({"experts"})

    def __init__(self, session: Session) -> None:
        self.map = ExpertMap(session.selection)
        super().__init__(session)

    def columns(self) -> Sequence[Sequence[Panel]]:
        return ((self.map, ExpertDetails(self.session.selection)),)

    def update_from(self, store: Store, tick: int) -> None:
        if (absent := no_experts(store)) != self.has_class("-no-experts"):
            self.set_class(absent, "-no-experts")
            if absent and self._current == "expert":
                self.action_turn(1)
        super().update_from(store, tick)

    def _reachable(self) -> list[str]:
        absent = self.has_class("-no-experts")
        return [name for name in super()._reachable() if not (absent and name == "expert")]

    def _arrange(self) -> None:
        super()._arrange()
        self.map.alone = self.has_class("-solo")

    # ------------------------------------------------------------------------------------- one layer

    def action_zoom(self) -> None:
        """If the map has the focus, switch between the loads of all layers and the loads of the layer under the cursor
        as bars. Otherwise, maximise the panel that has the focus."""
        if self._current == self.map.id:
            self._show_one_layer(not self.map.one_layer)
        else:
            super().action_zoom()

    async def action_open(self) -> None:
        self.action_zoom()

    async def action_back(self) -> None:
        if self.map.one_layer:
            self._show_one_layer(False)
        else:
            await super().action_back()

    def _show_one_layer(self, one: bool) -> None:
        if one and self.map.cell is None:
            self.map.action_worst()
        self.map.one_layer = one
        self.map.metric = None
        self.map.redraw()
