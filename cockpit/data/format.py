"""Formats numbers and words for the screens: fixed width and right-aligned, so that values do not jitter.

A missing value is never shown as zero; `None` and NaN are shown as `·`.
"""

import math
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from agents.protocol import PAUSED, Value, spell
from agents.protocol import clean as clean

MISSING = "·"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[mµ]?s|[kKMGT]i?B(?:/s)?)(?!\w))")
# Digits grouped once, such as 1 610. Several groups could also be a list of numbers, which may be cut.
_GROUPED = re.compile(r"(?<!\d)(?<!\d )(\d{1,3}) (\d{3})(?! ?\d)")
SIZES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
SPELLED = 10_000  # smaller numbers are written in full, larger ones with an SI prefix
STATES = (PAUSED, "starting", "waiting")  # states of a rank that are not operations


def fixed(value: float | None, width: int, digits: int = 1) -> str:
    """`value` right-aligned in `width` cells; with fewer digits if they do not fit."""
    if value is None or math.isnan(value):
        return MISSING.rjust(width)
    if math.isinf(value):
        return ("∞" if value > 0 else "-∞").rjust(width)
    for places in range(digits, -1, -1):
        text = f"{value:.{places}f}"
        if len(text) <= width:
            return text.rjust(width)
    return si(value).rjust(width)[:width]


def si(value: float | None) -> str:
    """A number with an SI prefix, such as ``19.9 k`` or ``1.2 M``; without a prefix below 1000, such as ``812``."""
    if value is None or math.isnan(value):
        return MISSING
    for size, letter in SIZES:
        if abs(value) >= size:
            return f"{value / size:.1f} {letter}"
    return f"{value:.0f}"


def duration_ms(value: float | None) -> str:
    """A step time with a fixed width, such as `` 412 ms`` or `` 12.4 s``."""
    if value is None or math.isnan(value):
        return f"{MISSING:>4} ms"
    return f"{value:4.0f} ms" if value < 10_000 else f"{value / 1000:5.1f} s"


def age(seconds: float) -> str:
    """An age in a unit that suits its size, such as ``0.4 s``, ``12 s``, ``3 min`` or ``2 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def operation_text(operation: str) -> tuple[str, str]:
    """The operation of a rank, split into a preposition and a phrase, such as (``in ``, ``backward, micro-batch 2``).
    The preposition is "" if `operation` is a state, such as ``paused``."""
    text = clean(operation) or "an unnamed operation"
    return "" if text.startswith(STATES) else "in ", text


def percent(value: float | None, width: int = 4) -> str:
    """A share from 0 to 1 as a percentage, such as ``21.4 %``. The number takes `width` cells."""
    return f"{fixed(None if value is None else 100 * value, width)} %"


def signed(value: float, digits: int = 0) -> str:
    """A number with its sign, such as ``+18``. A rounded zero is ``+0``, never ``-0``."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def excess(value: float, digits: int = 0) -> str:
    """A relative excess as a signed percentage, such as ``+18 %`` for 0.18."""
    return f"{signed(100 * value, digits)} %"


def shares_text(shares: Mapping[str, float]) -> str:
    """Named shares as text, such as ``schedule 20.1 + wait 3.0 + overhead 0.9 %``."""
    return " + ".join(f"{clean(name)} {100 * share:.1f}" for name, share in shares.items()) + " %"


def grouped(value: float | None, digits: str = ".0f") -> str:
    """A number with its digits grouped in threes, such as ``12 340``. `digits` is the format specification of the
    number; the default rounds to an integer.
    """
    return MISSING if value is None else f"{value:,{digits}}".replace(",", " ")


def spaced(text: str) -> str:
    """A sentence from the planner with spaces instead of commas as thousands separators, as on the screens."""
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", " ", text)


def _unbroken(text: str) -> str:
    """The text with no-break spaces inside numbers and between a number and its unit."""
    return _BEFORE_UNIT.sub("\u00a0", _GROUPED.sub("\\1\u00a0\\2", text))


def wrapped(text: str, width: int, **options: Any) -> list[str]:
    """The text in lines of at most `width` columns. A number stays on one line with its unit, and so do groups of
    digits. `options` are passed to `textwrap.wrap`."""
    lines = textwrap.wrap(_unbroken(text), width, **options)
    return [line.replace("\u00a0", " ") for line in lines]


def words(text: str) -> list[str]:
    """The words of `text`; a number and its unit form one word."""
    return [word.replace("\u00a0", " ") for word in _unbroken(text).split(" ")]


def counted(number: int, thing: str) -> str:
    """A count with its noun, such as ``1 rank`` or ``1 024 ranks``. `thing` is the noun in the singular."""
    plural = "es" if thing.endswith("ch") else "s"
    return f"{grouped(number)} {thing}{'' if number == 1 else plural}"


def coords(axes: Mapping[str, int]) -> str:
    """Grid coordinates as text, such as ``pp1 dp0 tp1``."""
    return " ".join(f"{clean(axis)}{at}" for axis, at in axes.items())


def knob(value: Value) -> str:
    """A knob's value as text, in the notation that the user types."""
    return clean(spell(value))


def change(before: Value, after: Value) -> str:
    """A change of a value as text, such as ``4→8``."""
    return f"{knob(before)}→{knob(after)}"
