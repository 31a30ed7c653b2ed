"""Robust fit of a line to measured times. The line gives the latency (the time at size 0) and the slope, such as
seconds per byte."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

Point = tuple[float, float]  # size, seconds


class Line(NamedTuple):
    """seconds = latency + size x slope; `error`: median relative deviation of the points."""

    latency: float
    slope: float
    error: float


def fit(points: Sequence[Point]) -> Line:
    """The line with the smallest sum of relative deviations |latency + size x slope - t| / t, with latency
    and slope >= 0.

    The deviations are relative, because sizes and times span several powers of ten: small messages determine the
    latency, and large messages determine the slope. The fit minimises absolute deviations instead of squares, so that
    one outlier hardly changes the line. The best line passes through two of the points, or through one if a coefficient
    is zero (Bloomfield and Steiger 1983, Least Absolute Deviations, section 1.2), so there are few candidates and all
    are tried. Raises ValueError if there are no points or a time is not positive.
    """
    if not points or any(size < 0 or seconds <= 0 for size, seconds in points):
        raise ValueError("a line needs points with sizes of at least 0 and times above 0")
    latency, slope = min(_candidates(points), key=lambda line: sum(_deviations(points, *line)))
    return Line(latency, slope, _median(_deviations(points, latency, slope)))


def _candidates(points: Sequence[Point]) -> Iterator[tuple[float, float]]:
    for size, seconds in points:
        yield seconds, 0.0
        if size > 0:
            yield 0.0, seconds / size
    for (size, seconds), (size2, seconds2) in combinations(points, 2):
        if size != size2:
            slope = (seconds2 - seconds) / (size2 - size)
            latency = seconds - slope * size
            if slope >= 0 and latency >= 0:
                yield latency, slope


def _deviations(points: Sequence[Point], latency: float, slope: float) -> list[float]:
    return [abs(latency + size * slope - seconds) / seconds for size, seconds in points]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
