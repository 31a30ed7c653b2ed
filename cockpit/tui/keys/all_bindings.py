"""All key bindings, as a list and by id."""

from cockpit.tui.keys.dialog_bindings import BOARD, ENDING, INFO, RUNS
from cockpit.tui.keys.general_bindings import APP, LIST, PANELS, PICKER, PROMPT, REPLAY, SCREENS
from cockpit.tui.keys.screen_bindings import (
    CHARTS,
    CONSOLE,
    CURVES,
    EXPERTS,
    GRID,
    LOG,
    MARKS,
    PLAN,
    RANK,
    RANK_STEPS,
    RANKS,
    STEPS,
    TIMELINE,
    TRAFFIC,
)

ALL = (
    *SCREENS,
    *APP,
    *PANELS,
    *GRID,
    *RANK_STEPS[len(RANKS) :],
    *RANK[len(RANKS) :],
    *PICKER,
    *EXPERTS,
    *TIMELINE,
    *STEPS,
    *TRAFFIC,
    *CURVES,
    *CHARTS,
    *MARKS,
    *LIST,
    *LOG,
    *CONSOLE,
    *RUNS,
    *PLAN,
    *INFO,
    *BOARD,
    *ENDING,
    *REPLAY,
    *PROMPT,
)

BY_ID = {action.id: action for action in ALL}
