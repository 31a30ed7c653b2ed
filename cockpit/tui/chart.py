"""Line charts as lines of text: the adapter for plotext, which draws the canvas, the y axis and its ticks.

This module sets the ranges and ticks, because plotext's defaults follow the data, so a growing curve would shift the
scale at each draw. The caller draws the x axis, because plotext's x axis takes two rows (a line, and labels), and its
labels leave no place for marks between them. Drawing 200 points in 100 x 14 cells takes 2.2 ms without axes, 2.3 ms
with the y axis, and 2.9 ms with plotext's default axes, which also take up four rows.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import plotext

from agents.state.metric_curve import Point
from cockpit.data import format

AXIS = 8  # width of the y axis, in columns
LABEL = AXIS - 2  # width of the labels of the y axis; a space and the line follow


def lines(
    polylines: Sequence[Sequence[Point]],
    width: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> list[str]:
    """Draw a line through each of `polylines`, with a y axis of `AXIS` columns on the left. Returns `height` strings of
    `width` cells."""
    figure: Any = plotext.figure
    plotext.terminal.limit(False, False)  # plotext would cut the chart to its own guess of the terminal size
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    figure.axes(False)
    figure.axes(True, axis="y", side="left")
    for axis, ends in (("x", x_range), ("y", y_range)):
        for side in (0, 1):
            ruler = figure.ruler(axis, side)
            ruler.lim(*ends)
            ruler.frequency(0)
    ticks = _ticks(height, y_range)
    figure.ruler("y", 0).ticks(ticks, [f"{tick(value):>{LABEL}} " for value in ticks])
    for run in polylines:
        xs, ys = [float(step) for step, _ in run], [value for _, value in run]
        figure.draw(figure.signal(xs, ys, marker="braille").lines())
    drawn = figure.build().string(colorless=True).split("\n")
    return [line.ljust(width)[:width] for line in drawn[:height]]


def _ticks(height: int, y_range: tuple[float, float]) -> list[float]:
    """Values of the top row, the bottom row and, if there is room, the middle row."""
    low, high = y_range
    if height == 1:
        return [low]
    middle = high - (high - low) * (height // 2) / (height - 1)
    return [low, middle, high] if height > 4 else [low, high]


def tick(value: float) -> str:
    """A value in at most `LABEL` columns."""
    text = format.si(value) if abs(value) >= 1000 else f"{value:.4g}"
    return text if len(text) <= LABEL else f"{value:.0e}"


def decimate(run: Sequence[Point], first: int, last: int, columns: int) -> list[Point]:
    """Keep the lowest and the highest point of each column, and both ends, because plotext takes 40 us per point."""
    if len(run) <= 2 * columns:
        return list(run)
    chosen = {run[0], run[-1]}
    for _, part in groupby(run, lambda point: (point[0] - first) * columns // (last - first + 1)):
        points = list(part)
        chosen |= {min(points, key=_value), max(points, key=_value)}
    return sorted(chosen)


def _value(point: Point) -> float:
    return point[1]


def nice_range(low: float, high: float) -> tuple[float, float]:
    """The range, extended to round numbers, so that the scale changes rarely."""
    if high - low < 1e-12:
        pad = abs(high) * 0.05 or 1.0
        return low - pad, high + pad
    unit = 10 ** math.floor(math.log10((high - low) / 4))
    unit *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (unit * factor) <= 5)
    return math.floor(low / unit) * unit, math.ceil(high / unit) * unit
