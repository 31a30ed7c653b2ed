"""Every key, as data: an id that does not change, the keys that reach it, and what it does in a sentence.

A user remaps by id in ``keys.toml`` of the configuration directory, e.g. ``"app.knobs" = "b"``.
Never only ctrl+a or ctrl+b (tmux and screen take them) or Alt.
"""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from textual.binding import Binding

from cockpit.data import format


@dataclass(frozen=True)
class Action:
    """One thing a key does. `footer` puts it there: 1 stays longest where room is short, 0 is never shown."""

    id: str
    keys: str
    action: str
    label: str
    about: str
    footer: int = 0
    priority: bool = False
    operator: bool = False  # for who may change the run; a footer does not offer it to others


APP = (
    Action("app.knobs", "k", "knobs", "knobs", "Open the knob board: values, what is legal, change them", 3),
    Action(
        "app.undo",
        "u",
        "undo",
        "undo",
        "On the knob board, say which change would be taken back",
        operator=True,
    ),
    Action("app.freeze", "space", "freeze", "freeze", "Hold the picture still; again to let it run", 5),
    Action("app.save", "s", "save", "save", "Save the screen as an SVG file"),
    Action("app.theme", "t", "theme", "theme", "Dark or light"),
    Action("app.help", "question_mark,f1", "help", "help", "What the focused panel shows, and all keys", 2),
    Action("app.palette", "ctrl+p", "command_palette", "palette", "Find an action by name"),
    Action(
        "app.suspend",
        "ctrl+z",
        "suspend_process",
        "suspend",
        "Back to the shell; `fg` there returns",
        priority=True,
    ),
    Action(
        "app.quit",
        "q,ctrl+c",
        "quit",
        "quit",
        "Leave the cockpit; asked once more where that ends the run",
        1,
    ),
)

OVERVIEW = (
    Action("panel.next", "tab", "turn(1)", "panel", "Go to the next panel", 4, priority=True),
    Action(
        "panel.previous", "shift+tab", "turn(-1)", "previous panel", "Go to the panel before", priority=True
    ),
    Action("panel.zoom", "z", "zoom", "zoom", "Give the focused panel the whole screen; again to go back", 6),
    Action("panel.back", "escape", "back", "back", "Back from a maximised panel"),
)

GRID = (
    Action("ranks.metric", "m", "metric(1)", "metric", "Show the next metric", 7),
    Action("ranks.metric_back", "M", "metric(-1)", "metric before", "Show the metric before"),
    Action("ranks.group", "g", "regroup", "group", "Group the ranks by the next axis", 8),
    # `k` is the knob board on every screen, so the way up by letters is its capital.
    Action("ranks.left", "left,h", "cursor(-1,0)", "left", "Move the cursor left"),
    Action("ranks.down", "down,j", "cursor(0,1)", "down", "Move the cursor down"),
    Action("ranks.up", "up,K", "cursor(0,-1)", "up", "Move the cursor up"),
    Action("ranks.right", "right,l", "cursor(1,0)", "right", "Move the cursor right"),
)

CURVES = (
    Action(
        "curves.in", "up,K", "scale(0.5)", "closer", "Half as many steps, each drawn as finely as it is known"
    ),
    Action("curves.out", "down,j", "scale(2)", "wider", "Twice as many steps"),
    Action("curves.back", "left,h", "pan(-0.25)", "earlier", "Earlier steps"),
    Action("curves.on", "right,l", "pan(0.25)", "later", "Later steps"),
    Action("curves.all", "0", "all", "all steps", "The whole run again"),
)

BOARD = (
    Action("board.up", "up,shift+tab", "move(-1)", "knob", "The knob or action above"),
    Action("board.down", "down,tab", "move(1)", "knob", "The knob or action below"),
    Action("board.less", "left", "turn(-1)", "value", "The legal value before"),
    Action("board.more", "right", "turn(1)", "value", "The next legal value"),
    Action(
        "board.propose",
        "enter",
        "propose",
        "propose",
        "Ask the run to make the marked changes, all or none",
        3,
        operator=True,
    ),
    Action(
        "board.try",
        "ctrl+t",
        "try",
        "try",
        "Try the one marked knob: measured before and after, taken back unless clearly faster",
        6,
        operator=True,
    ),
    Action(
        "board.keep",
        "ctrl+k",
        "decide(True)",
        "keep",
        "Keep what the trial under way tries",
        4,
        operator=True,
    ),
    Action(
        "board.end",
        "ctrl+r",
        "decide(False)",
        "end trial",
        "End the trial, and take it back now",
        5,
        operator=True,
    ),
    Action(
        "board.undo",
        "ctrl+u",
        "undo",
        "undo",
        "Say which change would be taken back; again to take it back",
        7,
        operator=True,
    ),
    Action("board.help", "question_mark,f1", "help", "help", "What the board shows, and its keys", 1),
    Action("board.close", "escape", "close", "close", "Drop what is marked; again to close", 2),
)

ENDING = (
    Action("ending.save", "s", "save", "save, then end", "Save a checkpoint, then end the run", 3),
    Action("ending.end", "y", "end", "end", "End the run now", 2),
    Action("ending.stay", "escape,n", "stay", "let it go on", "Let the run go on", 1),
)

REPLAY = (
    Action("replay.pause", "space", "pause", "play/pause", "Play on, or pause; at the end, play again", 3),
    Action("replay.back", "comma", "step(-1)", "step back", "Go one step of training back, and pause", 7),
    Action("replay.on", "full_stop", "step(1)", "step on", "Go one step of training on, and pause", 8),
    Action("replay.slower", "minus", "faster(-1)", "slower", "Play half as fast", 9),
    Action("replay.faster", "plus,equals_sign", "faster(1)", "faster", "Play twice as fast", 9),
    Action("replay.rewind", "left_square_bracket", "jump(-1)", "rewind", "Go back a twentieth of it all"),
    Action("replay.forward", "right_square_bracket", "jump(1)", "forward", "Go on a twentieth of it all"),
    Action("replay.begin", "home", "ends(-1)", "beginning", "Go to the beginning"),
    Action("replay.end", "end", "ends(1)", "end", "Go to the end of what is recorded by now"),
)


def bindings(actions: tuple[Action, ...]) -> list[Binding]:
    return [
        Binding(
            action.keys,
            action.action,
            action.label,
            show=action.footer > 0,
            tooltip=action.about,
            id=action.id,
            priority=action.priority,
        )
        for action in actions
    ]


APP_KEYS = bindings(APP)
OVERVIEW_KEYS = bindings(OVERVIEW)
GRID_KEYS = bindings(GRID)
CURVES_KEYS = bindings(CURVES)
BOARD_KEYS = bindings(BOARD)
ENDING_KEYS = bindings(ENDING)

ALL = (*APP, *OVERVIEW, *GRID, *CURVES, *BOARD, *ENDING, *REPLAY)
BY_ID = {action.id: action for action in ALL}

_NAMES = {
    "question_mark": "?",
    "escape": "esc",
    "left": "←",
    "right": "→",
    "up": "↑",
    "down": "↓",
    "comma": ",",
    "full_stop": ".",
    "minus": "-",
    "plus": "+",
    "equals_sign": "=",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
}


def spelled(keys: str) -> str:
    """``left,h`` as it is shown: ``← h``."""
    return " ".join(_NAMES.get(key, key) for key in keys.split(","))


class KeymapError(ValueError):
    """A keymap file that cannot be used; the text is one sentence."""


def load_keymap(path: Path | None = None) -> dict[str, str]:
    """The user's keys by action id; none if there is no file. `KeymapError`: no table of known ids."""
    path = path or config_dir() / "keys.toml"
    try:
        keymap = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KeymapError(f"{path} cannot be read: {error}") from None
    for name, keys in keymap.items():
        if name not in BY_ID or not isinstance(keys, str):
            legal = ", ".join(sorted(BY_ID))
            raise KeymapError(
                f'{path}: {format.clean(name)} must be one of {legal}, with keys such as "x" or "f2,x"'
            )
    return keymap


def config_dir() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "cockpit"
