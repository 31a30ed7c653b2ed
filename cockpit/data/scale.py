"""Scales of the y axis of a chart: linear or logarithmic, over all values or without the outermost 1 % at each end."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from cockpit.data import format

LABEL: Final = 7  # maximum width of a label of the axis, in columns
LARGEST: Final = 1e300  # values beyond it are off the scale, so that no difference of two values overflows
SMALLEST: Final = 1e-290  # smaller differences count as zero, so that no quotient overflows
OUTER: Final = 0.01  # share of the values at each end that the robust range leaves out
# `AUTO` leaves outer values out if the others would fill less than this share of the height
SQUEEZED: Final = 0.25


class Range(Enum):
    """How the range of the y axis is derived from the data. The value of each enum member is the word that the screen
    shows."""

    AUTO = "auto"  # like FULL, unless a few values would compress the range of all others
    ROBUST = "robust"  # without the outermost values
    FULL = "full"  # all values


@dataclass(frozen=True)
class Scale:
    """A range of values, and whether the axis is logarithmic; `low` < `high`, and both are positive on a logarithmic
    axis.
    """

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """The position of a value: 0 at `low`, 1 at `high`; below 0 or above 1 if the value is off the scale; NaN for
        NaN."""
        if self.log:
            if value <= 0:
                return -math.inf
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(min(value, LARGEST)) - low) / (high - low)
        return (max(-LARGEST, min(value, LARGEST)) - self.low) / (self.high - self.low)

    def value(self, place: float) -> float:
        """The value at position `place`, which is 0 at `low` and 1 at `high`."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return math.exp(low + (high - low) * place)
        return self.low + (self.high - self.low) * place

    def labels(self, places: Sequence[float]) -> list[str]:
        """The axis labels for the positions `places`, where 0 is `low` and 1 is `high`: numbers of at most `LABEL`
        columns, with enough digits to distinguish them."""
        values = [self.value(place) for place in places]
        span = self.high - self.low
        values = [0.0 if abs(value) < span * 1e-9 and not self.log else value for value in values]
        texts: list[str] = []
        for digits in (3, 4, 5, 6):
            texts = [label(value, digits) for value in values]
            if len(set(texts)) == len(values) and all(
                abs(float(f"{value:.{digits}g}") - value) <= 0.001 * span or self.log for value in values
            ):
                break
        return texts


def label(value: float, digits: int = 4) -> str:
    """A value in at most `LABEL` columns, such as ``2.113``, ``1 114``, ``19.9 k`` or ``1e-05``."""
    if 1000 <= abs(value) < format.SPELLED:
        return format.grouped(value)
    if 1000 <= abs(value) < 1e15:
        for fewer in range(max(3, digits), 2, -1):
            if len(text := _thousands(value, fewer)) <= LABEL:
                return text
    text = f"{value:.{digits}g}"
    while len(text) > LABEL and digits > 1:
        digits -= 1
        text = f"{value:.{digits}g}"
    return text


def _thousands(value: float, digits: int) -> str:
    """A number with an SI prefix and up to `digits` digits (at least three), such as ``19.9 k`` or ``19.85 k``."""
    size, letter = next(one for one in format.SIZES if abs(value) >= one[0])
    return f"{value / size:.{max(3, digits)}g} {letter}"


def choose(values: Iterable[float], range: Range, log: bool = False) -> tuple[Scale, bool]:
    """The scale of the y axis for a chart of `values`, and whether any of them lie outside the scale. Values that are
    not finite are ignored. On a logarithmic scale, values of zero or less are ignored too."""
    ordered = sorted([value for value in values if value == value])  # NaN is not equal to itself
    least = SMALLEST if log else -LARGEST
    kept = ordered[bisect_left(ordered, least) : bisect_right(ordered, LARGEST)]
    if not kept:
        return (Scale(0.1, 1.0, True) if log else Scale(0.0, 1.0)), False
    low, high = kept[0], kept[-1]
    if range is not Range.FULL:
        inner = kept[int(OUTER * len(kept))], kept[-1 - int(OUTER * len(kept))]
        squeezed = _width(*inner, log) < SQUEEZED * _width(low, high, log)
        if inner[0] < inner[1] and (range is Range.ROBUST or squeezed) and inner != (low, high):
            return _round(*inner, log), True
    return _round(low, high, log), False


def _width(low: float, high: float, log: bool) -> float:
    return math.log(high) - math.log(low) if log else high - low


def _round(low: float, high: float, log: bool) -> Scale:
    return Scale(*(nice_decades(low, high) if log else nice_range(low, high)), log)


def nice_range(low: float, high: float) -> tuple[float, float]:
    """The range from `low` to `high`, extended to round numbers so that the scale rarely changes."""
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-9 * largest, SMALLEST):
        # A constant: half of the distance to zero on each side, so that labels stay short.
        pad = largest / 2 if largest > SMALLEST else 1.0
        return nice_range(low - pad, high + pad)
    unit = 10.0 ** math.floor(math.log10((high - low) / 4))
    unit *= next((factor for factor in (1, 2, 5) if (high - low) / (unit * factor) <= 5), 10)
    return math.floor(low / unit) * unit, math.ceil(high / unit) * unit


def nice_decades(low: float, high: float) -> tuple[float, float]:
    """The range of positive values, extended to 1, 2 or 5 times a power of ten."""
    below, above = _round_down(low), _round_up(high)
    return (below, above) if below < above else (below / 2, above * 2)


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max(
        (factor * power for factor in (1, 2, 5) if factor * power <= value * (1 + 1e-9)), default=value
    )


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))
