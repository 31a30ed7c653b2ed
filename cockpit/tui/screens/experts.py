"""Screen 4: the load of each expert of each layer."""

from collections.abc import Sequence

from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.widgets.experts import ExpertLoad
from cockpit.tui.widgets.panel import Panel


class Experts(RunScreen):
    """The expert loads on the whole screen."""

    NAME = "experts"
    SAMPLES = frozenset({"experts"})

    def columns(self) -> Sequence[Sequence[Panel]]:
        return ((ExpertLoad("experts"),),)
