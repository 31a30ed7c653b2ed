"""Every key, as data: an id that does not change, the keys that reach it, and what it does in a sentence.

A user remaps by id in ``keys.toml`` of the configuration directory, e.g. ``"app.knobs" = "b"``.
Never only ctrl+a or ctrl+b (tmux and screen take them) or Alt.
"""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from textual.binding import Binding

from cockpit import format


@dataclass(frozen=True)
class Action:
    """One thing a key does. `shown` puts it in the footer."""

    id: str
    keys: str
    action: str
    label: str
    about: str
    shown: bool = False
    priority: bool = False


APP = (
    Action(
        "app.knobs", "k", "knobs", "knobs", "Open the knob board: values, what is legal, change them", True
    ),
    Action("app.freeze", "space", "freeze", "freeze", "Hold the picture still; again to let it run", True),
    Action("app.save", "s", "save", "save", "Save the screen as an SVG file"),
    Action("app.theme", "t", "theme", "theme", "Dark or light"),
    Action(
        "app.help", "question_mark,f1", "help", "help", "What the focused panel shows, and all keys", True
    ),
    Action("app.palette", "ctrl+p", "command_palette", "palette", "Find an action by name"),
    Action("app.quit", "q,ctrl+c", "quit", "quit", "Leave the cockpit", True),
)

OVERVIEW = (
    Action("panel.next", "tab", "turn(1)", "panel", "Go to the next panel", True, priority=True),
    Action(
        "panel.previous", "shift+tab", "turn(-1)", "previous panel", "Go to the panel before", priority=True
    ),
    Action(
        "panel.zoom",
        "z",
        "zoom",
        "zoom",
        "Give the focused panel the whole screen; again to go back",
        True,
    ),
    Action("panel.back", "escape", "back", "back", "Back from a maximised panel"),
)

GRID = (
    Action("ranks.metric", "m", "metric(1)", "metric", "Show the next metric", True),
    Action("ranks.metric_back", "M", "metric(-1)", "metric before", "Show the metric before"),
    Action("ranks.group", "g", "regroup", "group", "Group the ranks by the next axis", True),
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
    Action("board.up", "up,shift+tab", "move(-1)", "knob", "The knob above"),
    Action("board.down", "down,tab", "move(1)", "knob", "The knob below"),
    Action("board.less", "left", "turn(-1)", "value", "The legal value before"),
    Action("board.more", "right", "turn(1)", "value", "The next legal value"),
    Action(
        "board.propose",
        "enter",
        "propose",
        "propose",
        "Ask the run to make the marked changes, all or none",
        True,
    ),
    Action(
        "board.try",
        "ctrl+t",
        "try",
        "try",
        "Try the one marked knob: measured before and after, taken back unless clearly faster",
        True,
    ),
    Action("board.keep", "ctrl+k", "decide(True)", "keep", "Keep what the trial under way tries", True),
    Action("board.end", "ctrl+r", "decide(False)", "end trial", "End the trial, and take it back now", True),
    Action(
        "board.undo",
        "ctrl+z",
        "undo",
        "undo",
        "Say which change would be taken back; again to take it back",
        True,
    ),
    Action("board.help", "question_mark,f1", "help", "help", "What the board shows, and its keys", True),
    Action("board.close", "escape", "close", "close", "Drop what is marked; again to close", True),
)

REPLAY = (
    Action("replay.pause", "space", "pause", "play/pause", "Play on, or pause; at the end, play again", True),
    Action("replay.back", "comma", "step(-1)", "step back", "Go one step of training back, and pause", True),
    Action("replay.on", "full_stop", "step(1)", "step on", "Go one step of training on, and pause", True),
    Action("replay.slower", "minus", "faster(-1)", "slower", "Play half as fast", True),
    Action("replay.faster", "plus,equals_sign", "faster(1)", "faster", "Play twice as fast", True),
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
            show=action.shown,
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
    known = {action.id for action in (*APP, *OVERVIEW, *GRID, *CURVES, *BOARD, *REPLAY)}
    for name, keys in keymap.items():
        if name not in known or not isinstance(keys, str):
            legal = ", ".join(sorted(known))
            raise KeymapError(
                f'{path}: {format.clean(name)} must be one of {legal}, with keys such as "x" or "f2,x"'
            )
    return keymap


def config_dir() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "cockpit"
