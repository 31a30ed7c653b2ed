"""Refusals as one sentence for a person: printable, and no longer than a person reads, whatever was refused."""

import reprlib
from typing import Any

from agents.protocol import clean

MOST = 1000  # characters of a sentence
MOST_OF_VALUE = 120

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, MOST_OF_VALUE, MOST_OF_VALUE, 40


class RefusedError(ValueError):
    """What is wrong, where, and what would be legal: one sentence."""

    def __init__(self, text: str):
        super().__init__(one_sentence(text))


class LayoutError(RefusedError):
    """What is wrong with a layout, where, and what would be legal: one sentence."""


def one_sentence(text: str) -> str:
    """`text` without control characters, cut in its middle where it is too long: its end says what would be legal."""
    if len(text) > MOST:
        text = f"{text[: MOST // 2]} ... {text[-MOST // 2 :]}"
    return clean(text)


def shown(value: Any) -> str:
    """A value as Python writes it, cut in its middle where it is too long."""
    try:
        return _short.repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "a number of thousands of digits"
