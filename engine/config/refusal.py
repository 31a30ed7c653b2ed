"""Exceptions for mistakes in a user's input. The message is always one printable sentence of bounded length, whatever
the refused value contains."""

import reprlib
from datetime import date, time
from typing import Any

from agents.protocol import clean

MOST = 1000  # maximum number of characters in a sentence
MOST_OF_VALUE = 120  # maximum number of characters of a value in the sentence

OWN_MODEL = "model.implementation = {} is not the built-in model; legal for {}: transformer"

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, MOST_OF_VALUE, MOST_OF_VALUE, 40


class RefusedError(ValueError):
    """A user's mistake. The message is one sentence: what is wrong, where, and what is legal."""

    def __init__(self, text: str):
        super().__init__(one_sentence(text))


class LayoutError(RefusedError):
    """An error in a layout. The message is one sentence with the key, its value and the legal values."""


def one_sentence(text: str) -> str:
    """`text` without control characters. If the text is too long, its middle is cut out; the end is kept, because it
    lists the legal values.
    """
    if len(text) > MOST:
        text = f"{text[: MOST // 2]} ... {text[-MOST // 2 :]}"
    return clean(text)


def shown(value: Any) -> str:
    """A bool, date or time as TOML writes it, and any other value as its repr. If the repr is too long, its middle is
    cut out."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, date | time):
        return value.isoformat()
    try:
        return _short.repr(value)
    except ValueError:  # an integer with more digits than Python converts to text
        return "a number with thousands of digits"
