"""A key binding: a stable id, the keys, the action that they run, and one sentence of help.

Users remap keys by action id in ``keys.toml`` in the configuration directory, with lines such as ``"app.knobs" = "b"``.
Every action has at least one key that is neither ctrl+a nor ctrl+b (the prefix keys of screen and tmux) nor an Alt key.
"""

from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True)
class Action:
    """One key binding. `footer` is the action's priority in the footer, where 1 is the highest priority; an action with
    0 is never shown there."""

    id: str
    keys: str
    action: str
    label: str
    about: str
    footer: int = 0
    priority: bool = False
    operator: bool = False  # the action changes the run, so the footer hides it from viewers


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


_NAMES = {
    "question_mark": "?",
    "escape": "esc",
    "left": "←",
    "right": "→",
    "up": "↑",
    "down": "↓",
    "comma": ",",
    "full_stop": ".",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "minus": "-",
    "plus": "+",
    "equals_sign": "=",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "left_curly_bracket": "{",
    "right_curly_bracket": "}",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "slash": "/",
    "colon": ":",
    "apostrophe": "'",
}


def spelled(keys: str) -> str:
    """Keys as shown on the screen, such as ``← h`` for ``left,h``."""
    return " ".join(_NAMES.get(key, key) for key in keys.split(","))
