"""The table of the screens, by name; `cockpit.tui.keys.general_keys.SCREENS` has their keys."""

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
