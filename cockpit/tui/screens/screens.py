"""The screens by name. The keys of the screens are in `cockpit.tui.keys.general_bindings.SCREENS`."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import ClassVar

from cockpit.tui.screens.run_screen import RunScreen


class _Screens(Mapping[str, type[RunScreen]]):
    """The class of each screen by name. A class is imported when it is first looked up, because only one screen is
    needed at startup."""

    NAMES: ClassVar = {
        "overview": "Overview",
        "ranks": "Ranks",
        "pipeline": "Pipeline",
        "experts": "Experts",
        "traffic": "Traffic",
        "curves": "Curves",
        "plan": "Plan",
        "log": "Log",
    }

    def __getitem__(self, name: str) -> type[RunScreen]:
        screen: type[RunScreen] = getattr(import_module(f"cockpit.tui.screens.{name}"), self.NAMES[name])
        return screen

    def __iter__(self) -> Iterator[str]:
        return iter(self.NAMES)

    def __len__(self) -> int:
        return len(self.NAMES)


RUN_SCREENS = _Screens()

PANEL_NAMES: dict[str, dict[str, str]] = {
    "overview": {"loss": "loss", "throughput": "throughput", "knobs": "knobs", "events": "events"},
    "ranks": {"ranks": "grid of ranks", "rank-steps": "rank × step", "rank": "inspector of a rank"},
    "pipeline": {
        "timeline": "timeline",
        "steps": "step times",
        "stages": "stages and bubble",
        "compare": "slowest step",
    },
    "experts": {"experts": "map of experts", "expert": "one expert: load, owner, since when"},
    "traffic": {"matrix": "all-to-all matrix", "axes": "traffic by axis", "fit": "fit of times to bytes"},
    "curves": {"charts": "charts", "marks": "list of marks", "differences": "differences of runs"},
    "plan": {
        "what-if": "what-if",
        "memory": "memory",
        "advice": "advice",
        "charts": "roofline and scaling",
    },
    "log": {"log": "log", "console": "console output"},
}
"""Names of panels by screen and id, for the command palette. Panels of the overview are listed only if they have no
screen of their own.
"""
