"""Screen 5: the traffic between ranks."""

from collections.abc import Sequence

from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.traffic import TrafficByAxis


class Traffic(RunScreen):
    """The traffic by axis on the whole screen."""

    NAME = "traffic"
    SAMPLES = frozenset({"peers"})

    def columns(self) -> Sequence[Sequence[Panel]]:
        return ((TrafficByAxis("traffic"),),)
