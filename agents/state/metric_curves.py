"""Keeps the curves of a run's metrics, such as the loss curve, in bounded memory. For each bucket of steps, five values
of each metric are kept: the first, the lowest, the highest, the last, and the first that is not finite.

All buckets have the same width and are aligned: step s is in bucket s // width, and the width is the smallest power of
two that gives at most `BUCKETS` buckets. So a curve depends only on the values, not on the order or grouping in which
they arrive: bucketing in two stages gives the same result as bucketing once. A line chart with at least one bucket per
column looks the same as a chart of all values (the M4 method, Jugel et al., VLDB 2014). Each kept value is the value of
a single step, not an average.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Final

from agents.protocol import Bucketed, Summary

BUCKETS: Final = 1024
METRICS: Final = (
    "loss",
    "validation_loss",
    "grad_norm",
    "lr",
    "step_ms",
    "tokens_per_s",
    "mfu",
    "bubble",
    "a2a_bytes",
    "dropped",
    "load_max_over_mean",
    "replica_bytes",
    "loss_scale",
    "skipped_steps",
)
"""Fields of `Summary` that have a curve."""

Point = tuple[int, float]


@dataclass
class Series:
    """The values of one metric, ordered by step."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def __copy__(self) -> "Series":
        return Series(self.steps[:], self.values[:])

    def append(self, step: int, value: float, width: int) -> None:
        """Add the value of a step that is later than all others."""
        start = len(self.steps)
        while start and self.steps[start - 1] // width == step // width:
            start -= 1
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) - start > 2:
            places = [start + place for place in kept(self.values[start:])]
            self.steps[start:] = array("q", [self.steps[place] for place in places])
            self.values[start:] = array("d", [self.values[place] for place in places])

    def thin(self, width: int) -> None:
        """In each bucket of `width` steps, keep only the values that `kept` selects."""
        places: list[int] = []
        start, end = 0, len(self.steps)
        while start < end:
            following = (self.steps[start] // width + 1) * width
            start, first = bisect_left(self.steps, following, start), start
            places += [first + place for place in kept(self.values[first:start])]
        self.steps = array("q", [self.steps[place] for place in places])
        self.values = array("d", [self.values[place] for place in places])

    def insert(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add the values of steps, given in any order; existing values are not replaced."""
        points = dict(zip(steps, values, strict=False)) | dict(zip(self.steps, self.values, strict=True))
        self.steps = array("q", sorted(points))
        self.values = array("d", [points[step] for step in self.steps])

    def cut(self, step: int) -> None:
        """Remove `step` and all later steps."""
        place = bisect_left(self.steps, step)
        del self.steps[place:], self.values[place:]


@dataclass
class Curve:
    """The curves of all metrics, in buckets of `width` steps."""

    width: int = 1
    series: dict[str, Series] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.series)

    def __copy__(self) -> "Curve":
        return Curve(self.width, {metric: copy(series) for metric, series in self.series.items()})

    @property
    def first(self) -> int | None:
        """The oldest step with a value."""
        return min((series.steps[0] for series in self.series.values()), default=None)

    @property
    def last(self) -> int | None:
        return max((series.steps[-1] for series in self.series.values()), default=None)

    def points(self, metric: str) -> list[Point]:
        """The kept (step, value) pairs of a metric, ordered by step; a value may be NaN or infinite."""
        series = self.series.get(metric)
        return list(zip(series.steps, series.values, strict=True)) if series else []

    def extend(self, summaries: Iterable[Summary]) -> None:
        """Add the metrics of summaries; existing values are not replaced."""
        for metric, points in _columns(summaries).items():
            series = self.series.setdefault(metric, Series())
            if len(points) == 1 and (not series.steps or series.steps[-1] < points[0][0]):
                series.append(*points[0], self.width)  # the usual case: one step after another
            else:
                series.insert([step for step, _ in points], [value for _, value in points])
                series.thin(self.width)
        self._widen()

    def insert(self, part: Bucketed, before: int | None = None) -> None:
        """`part` contains values of one metric. Insert those that are older than this curve's oldest value of that
        metric. If this curve has no value of the metric yet, insert the values of `part` for all steps before the step
        `before`, or all values of `part` if `before` is None.
        """
        series = self.series.get(part.metric, Series())
        first = series.steps[0] if series.steps else before
        older = {
            step: value
            for step, value in zip(part.steps, part.values, strict=False)
            if first is None or step < first
        }
        if older and part.metric in METRICS:
            series.insert(list(older), list(older.values()))
            series.thin(self.width)
            self.series[part.metric] = series
            self._widen(part.width)

    def cut(self, step: int) -> None:
        """Remove the values of `step` and of all later steps. The bucket that contains `step` may lose its lowest or
        highest value."""
        for series in self.series.values():
            series.cut(step)
        self.series = {metric: series for metric, series in self.series.items() if series.steps}
        if not self.series:
            self.width = 1

    def parts(self) -> Iterator[Bucketed]:
        """Messages from which `insert` rebuilds this curve."""
        for metric, series in self.series.items():
            yield Bucketed(metric, self.width, series.steps.tolist(), series.values.tolist())

    def _widen(self, least: int = 1) -> None:
        first, last = self.first, self.last
        if first is None or last is None:
            return
        width = max(self.width, least)
        while last // width - first // width >= BUCKETS:
            width *= 2
        if width != self.width:
            self.width = width
            for series in self.series.values():
                series.thin(width)


def _columns(summaries: Iterable[Summary]) -> dict[str, list[Point]]:
    """The (step, value) pairs of each metric, without missing values."""
    columns: dict[str, list[Point]] = {}
    for summary in summaries:
        for metric in METRICS:
            value = getattr(summary, metric)
            if value is not None:
                columns.setdefault(metric, []).append((summary.step, float(value)))
    return columns


def kept(values: "Sequence[float] | array[float]") -> list[int]:
    """Indices of the values that a bucket keeps: first, last, lowest, highest, and the first that is not finite."""
    if len(values) <= 2:
        return list(range(len(values)))
    if math.isfinite(sum(values)):  # true only if every value is finite
        return sorted({0, len(values) - 1, values.index(min(values)), values.index(max(values))})
    places = {0, len(values) - 1}
    finite = [place for place, value in enumerate(values) if math.isfinite(value)]
    if finite:
        places |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    if len(finite) < len(values):
        places.add(next(place for place, value in enumerate(values) if not math.isfinite(value)))
    return sorted(places)
