"""Screen 5: how much data each rank sends to every other rank, and the time in collectives."""

from collections.abc import Sequence

from cockpit.data.store import Store
from cockpit.data.traffic.traffic import expected
from cockpit.knobs.plan.axes import AxesPlan
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.traffic.by_axis import TrafficByAxis
from cockpit.tui.widgets.traffic.fit import TrafficFit
from cockpit.tui.widgets.traffic.matrix import TrafficMatrix
from cockpit.tui.widgets.traffic.missing import no_traffic


class Traffic(RunScreen):
    """The all-to-all matrix; beside it, the traffic of each axis and a fitted model of the time in its collectives. If
    the run has no all-to-all, the panel with the matrix is hidden; if no axis has traffic, the panel with the fitted
    model is hidden."""

    NAME = "traffic"
    SAMPLES = frozenset({"peers"})

    def columns(self) -> Sequence[Sequence[Panel]]:
        self._no_matrix = False
        return (
            (TrafficMatrix(self.session.selection),),
            (TrafficByAxis("axes", True, self.session.selection), TrafficFit(AxesPlan(self.session.folder))),
        )

    def update_from(self, store: Store, tick: int) -> None:
        absent = store.summary is not None and not expected(store)
        if absent != self._no_matrix:
            self._no_matrix = absent
            self.set_class(absent, "-no-matrix")
            if absent and self._current == "matrix":
                self.action_turn(1)
        self.set_class(none := no_traffic(store), "-no-traffic")
        if none and self._current == "fit":
            self.action_turn(1)
        super().update_from(store, tick)

    def _reachable(self) -> list[str]:
        hidden = {"matrix"} if self._no_matrix else set()
        hidden |= {"fit"} if self.has_class("-no-traffic") else set()
        return [name for name in super()._reachable() if name not in hidden]
