"""Curves of a run for a chart: segments of steps, each at the best available resolution.

For old steps, the state of a run keeps only a few values per bucket of steps (`agents.state.metric_curves`); `detail`
contains every step in the visible range, read from the recording.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agents.alerts.finding import median
from agents.state.metric_curves import Curve, Point
from agents.state.run_state import RunState
from cockpit.data.curves.view import View
from cockpit.data.scale import LARGEST


@dataclass(frozen=True)
class Segment:
    """The points of a curve in a range of steps. Of each bucket of `width` steps, the first, lowest, highest and last
    value are kept; with a width of 1, every value is kept."""

    points: Sequence[Point]
    width: int = 1


def segments(
    state: RunState, metric: str, view: View | None = None, detail: Curve | None = None
) -> list[Segment]:
    """The segments of a metric's curve within `view`, oldest first."""
    whole = state.summaries[0].step if state.summaries else math.inf
    old, fine = state.curve.points(metric), detail.points(metric) if detail else []
    fine = [point for point in fine if point[0] < whole]
    width = state.curve.width
    found = [Segment(old, width)]
    if detail and detail.first is not None and detail.last is not None:
        begin, end = detail.first, detail.last
        found = [
            Segment([point for point in old if point[0] < begin], width),
            Segment(fine, detail.width),
            Segment([point for point in old if point[0] > end], width),
        ]
    found.append(Segment(state.points(metric)[len(old) :]))
    if view:
        first, last = view
        found = [Segment([p for p in one.points if first <= p[0] <= last], one.width) for one in found]
    return [one for one in found if one.points]


def polylines(found: Sequence[Segment], step_columns: float) -> Iterator[list[Point]]:
    """Split the points into polylines. A polyline ends at a value that is not finite. A polyline also ends at a gap
    with more steps than fit into a column of the chart (a step takes `step_columns` columns).
    """
    usual = _usual(found)
    points = [point for one in found for point in one.points]
    values = [value for _, value in points]
    gaps = [b - a for (a, _), (b, _) in pairwise(points)]
    if points and math.isfinite(sum(values)) and max(gaps, default=0) <= max(usual, 1 / step_columns):
        yield points  # the usual case; the loop below takes ten times as long
        return
    known = [(point, one.width) for one in found for point in one.points]
    run: list[Point] = []
    for point, width in known:
        if run:
            gap = point[0] - run[-1][0]
            missing = gap > usual and gap * step_columns > 1 and point[0] // width != run[-1][0] // width
            if missing or not math.isfinite(point[1]):
                yield run
                run = []
        if math.isfinite(point[1]):
            run.append(point)
    if run:
        yield run


def _usual(found: Sequence[Segment]) -> int:
    """The median number of steps from one point of a curve to the next, in segments without buckets. It may exceed 1,
    because some training loops do not report every step.
    """
    gap = [b - a for one in found if one.width == 1 for (a, _), (b, _) in pairwise(one.points)]
    return int(median(gap)) if gap else 1


@dataclass(frozen=True)
class Reading:
    """The value of a metric at a step or, if only a bucket of `width` steps has been kept, the lowest and the highest
    value in the bucket."""

    low: float
    high: float
    width: int = 1


def reading(found: Sequence[Segment], step: int) -> Reading | None:
    """The value of the metric at `step`, or its range in the bucket that contains `step` (the value that is
    not finite, if the bucket has one); None if the run reported no value there."""
    for one in found:
        at = bisect_left(one.points, step, key=_step)
        if at < len(one.points) and one.points[at][0] == step:
            return Reading(one.points[at][1], one.points[at][1])
        if one.width > 1:
            bucket = step // one.width
            begin = bisect_left(one.points, bucket * one.width, key=_step)
            values = [value for place, value in one.points[begin : begin + 8] if place // one.width == bucket]
            broken = [value for value in values if not math.isfinite(value)]
            if broken:  # the range of the others would hide it
                return Reading(broken[0], broken[0])
            if values:
                return Reading(min(values), max(values), one.width)
    return None


def _step(point: Point) -> int:
    return point[0]


def smoothed(runs: Iterable[Sequence[Point]], half_life: float) -> list[list[Point]]:
    """The exponential moving average along polylines, which are in step order; it continues from one polyline to the
    next. A value loses half of its weight after `half_life` steps, even if some of those steps have no value."""
    total = weight = 0.0
    before: int | None = None
    found = []
    keeps: dict[int, float] = {}  # share of the weight that remains after the given number of steps
    for run in runs:
        line = []
        for step, value in run:
            if abs(value) > LARGEST:
                continue  # the value would outweigh all later ones
            gap = 1 if before is None else step - before
            keep = keeps.get(gap)
            if keep is None:
                keep = keeps[gap] = 0.5 ** (gap / half_life)
            total, weight, before = keep * total + (1 - keep) * value, keep * weight + 1 - keep, step
            line.append((step, total / weight))
        found.append(line)
    return found


def half_life(steps: int, share: float) -> int:
    """`share` times the number of visible `steps`, rounded to 1, 2 or 5 times a power of ten; at least 2."""
    wanted = max(2.0, steps * share)
    power = 10.0 ** math.floor(math.log10(wanted))
    return int(min((factor * power for factor in (1, 2, 5, 10)), key=lambda one: abs(math.log(one / wanted))))
