"""Curves of a run for a chart: segments of steps, each at the best available resolution. Textual-free.

The state of a run has only buckets for old steps (`agents.state.metric_curve`); `detail` has every step in the visible
range, read from the recording.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agents.alerts.finding import median
from agents.state.metric_curve import Curve, Point
from agents.state.run_state import RunState

View = tuple[int, int]
"""The first and last visible step."""

MIN_STEPS = 16  # minimum number of steps in a view


@dataclass(frozen=True)
class Segment:
    """A range of steps with their values. A bucket of `width` steps keeps its first, lowest, highest and last value.
    With a width of 1, every value is kept."""

    points: Sequence[Point]
    width: int = 1


def extent(state: RunState) -> View | None:
    """The oldest and the newest step that have values."""
    newest = state.summaries[-1].step if state.summaries else state.curve.last
    oldest = state.curve.first if state.curve else state.summaries[0].step if state.summaries else None
    return None if oldest is None or newest is None else (oldest, newest)


def segments(
    state: RunState, metric: str, view: View | None = None, detail: Curve | None = None
) -> list[Segment]:
    """The curve of a metric, oldest first, within `view`."""
    whole = state.summaries[0].step if state.summaries else math.inf
    old, fine = state.curve.points(metric), detail.points(metric) if detail else []
    fine = [point for point in fine if point[0] < whole]
    width = state.curve.width
    found = [Segment(old, width)]
    if detail and fine:
        found = [
            Segment([point for point in old if point[0] < fine[0][0]], width),
            Segment(fine, detail.width),
            Segment([point for point in old if point[0] > fine[-1][0]], width),
        ]
    found.append(Segment(state.points(metric)[len(old) :]))
    if view:
        first, last = view
        found = [Segment([p for p in one.points if first <= p[0] <= last], one.width) for one in found]
    return [one for one in found if one.points]


def polylines(found: Sequence[Segment], step_columns: float) -> Iterator[list[Point]]:
    """Split the points into polylines. A polyline ends at a value that is not finite, and where more steps are missing
    than fit in a column of the chart (a step takes `step_columns` columns)."""
    known = [(point, one.width) for one in found for point in one.points]
    usual = _usual(found)
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
    """The median distance between neighbouring points in steps, because some loops report only every tenth step."""
    gap = [b[0] - a[0] for one in found if one.width == 1 for a, b in pairwise(one.points)]
    return int(median(gap)) if gap else 1


def zoom(view: View, by: float) -> View:
    """A view with the same centre, `by` times as wide."""
    first, last = view
    middle, half = (first + last) / 2, max(MIN_STEPS, (last - first) * by) / 2
    return max(0, math.floor(middle - half)), math.ceil(middle + half)


def pan(view: View, by: float) -> View:
    """The view, moved by the fraction `by` of its width. It does not start before step 0."""
    move = max(-view[0], round((view[1] - view[0]) * by))
    return view[0] + move, view[1] + move


def clamp(view: View, whole: View) -> View | None:
    """The view, moved so that it lies inside the run; None if it covers the whole run."""
    first, last = view
    if last - first >= whole[1] - whole[0]:
        return None
    move = max(0, whole[0] - first) - max(0, last - whole[1])
    return first + move, last + move
