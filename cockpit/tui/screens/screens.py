"""The table of the screens, by name; `cockpit.tui.keys.general_bindings.SCREENS` has their keys."""

from cockpit.tui.screens.curves import Curves
from cockpit.tui.screens.experts import Experts
from cockpit.tui.screens.log import Log
from cockpit.tui.screens.overview import Overview
from cockpit.tui.screens.pipeline import Pipeline
from cockpit.tui.screens.plan import Plan
from cockpit.tui.screens.ranks import Ranks
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.screens.traffic import Traffic

RUN_SCREENS: dict[str, type[RunScreen]] = {
    screen.NAME: screen for screen in (Overview, Ranks, Pipeline, Experts, Traffic, Curves, Plan, Log)
}

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
"""Names of panels by screen and id, for the command palette. Of the overview, those with no screen of their own."""
