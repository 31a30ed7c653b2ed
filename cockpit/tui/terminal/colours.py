"""Determines how many colours the terminal can show (Rich derives the number from `COLORTERM` and `TERM`), and handles
`NO_COLOR`."""

import os

from rich.console import Console

from cockpit.tui.drawing.themes import Depth

_FULL = {"truecolor", "256"}


def no_colour() -> bool:
    """Whether the user has turned colours off by setting `NO_COLOR` to a non-empty value (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def forget_empty_no_color() -> None:
    """Remove an empty `NO_COLOR` from the environment, because Textual would treat it as a request for no colours."""
    if os.environ.get("NO_COLOR") == "":
        del os.environ["NO_COLOR"]


def depth_of(console: Console) -> Depth:
    """The number of colours that the terminal of a console can show."""
    system = console.color_system
    if system is None:
        return Depth.NONE
    return Depth.FULL if system in _FULL else Depth.SIXTEEN
