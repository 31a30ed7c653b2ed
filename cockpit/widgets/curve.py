"""Curves: plotext behind one adapter, decimated to the width, with knob changes as marks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import plotext

from agents.wire import Summary
from cockpit import format
from cockpit.lines import Line
from cockpit.store import Mark, Store, Topic
from cockpit.theme import Palette
from cockpit.widgets.panel import Panel


@dataclass(frozen=True)
class Series:
    """A number of the whole job over steps."""

    key: str
    title: str
    unit: str
    get: Callable[[Summary], float | None]


LOSS = Series("loss", "Loss", "", lambda summary: summary.loss)
THROUGHPUT = Series("throughput", "Throughput", "tok/s", lambda summary: summary.tokens_per_s)


class Curve(Panel):
    """One series, whole run."""

    TOPICS = frozenset({Topic.CURVES})
    TITLE = "Curve"
    HELP = "One number of the job over the whole run. `╷` marks a knob change; the newest is written below."
    EVERY = 3  # under three times a second: a curve costs more than all the rest of the screen

    def __init__(self, series: Series) -> None:
        super().__init__(series.key)
        self.series = series

    def title(self, store: Store) -> str:
        summary = store.summary
        now = self.series.get(summary) if summary else None
        spelled = format.MISSING if now is None else (f"{now:.3f}" if abs(now) < 1000 else format.si(now))
        return f"{self.series.title} · {spelled} {self.series.unit}".rstrip()

    def subtitle(self, store: Store) -> str:
        marks = store.marks()
        return f"╷ step {format.grouped(marks[-1].step)}: {marks[-1].label}" if marks else ""

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[Line]:
        points = [
            (summary.step, value)
            for summary in store.state.summaries
            if (value := self.series.get(summary)) is not None and math.isfinite(value)
        ]
        if len(points) < 2:
            return [Line().add(f"{format.MISSING} the curve begins with the second step", colours.faint)]
        return plot(points, store.marks(), width, height, colours)


def plot(
    points: Sequence[tuple[int, float]], marks: Sequence[Mark], width: int, height: int, colours: Palette
) -> list[Line]:
    """The curve with its two rulers, `width` x `height` cells."""
    axis, rows = 8, height - 1
    if rows < 1 or width < axis + 8:
        return []
    columns = width - axis
    xs, ys = decimate(points, 2 * columns)
    low, high = nice_range(min(ys), max(ys))
    canvas = braille(xs, ys, columns, rows, (xs[0], xs[-1]), (low, high))
    first, last = points[0][0], points[-1][0]
    at_mark = {
        min(columns - 1, int((mark.step - first) / max(1, last - first) * columns))
        for mark in marks
        if first <= mark.step <= last
    }
    lines = []
    labelled = {0: high, rows - 1: low} | (
        {rows // 2: high - (high - low) * (rows // 2) / (rows - 1)} if rows > 4 else {}
    )
    for y in range(rows):
        label = f"{tick(labelled[y])} ┤" if y in labelled else "│"
        line = Line().add(label.rjust(axis), colours.dim)
        for x, glyph in enumerate(canvas[y]):
            marked = x in at_mark and glyph == " "
            line.add("╷" if marked else glyph, colours.mark if marked else colours.curve)
        lines.append(line)
    left, right = format.grouped(first), format.grouped(last)
    ruler = Line().add("└".rjust(axis), colours.dim).add(left, colours.dim)
    lines.append(ruler.pad_to(width - len(right), colours.faint).add(right, colours.dim))
    return lines


def decimate(points: Sequence[tuple[int, float]], most: int) -> tuple[list[float], list[float]]:
    """At most `most` points: of each stretch its lowest and highest, so that no spike is thinned away."""
    if len(points) > most:
        stretch = -(-2 * len(points) // most)
        kept: list[tuple[int, float]] = []
        for i in range(0, len(points), stretch):
            part = points[i : i + stretch]
            pair = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
            kept += sorted(pair)
        points = kept
    return [float(x) for x, _ in points], [y for _, y in points]


def nice_range(low: float, high: float) -> tuple[float, float]:
    """A range with round ends, so that the scale moves seldom."""
    if high - low < 1e-12:
        pad = abs(high) * 0.05 or 1.0
        return low - pad, high + pad
    unit = 10 ** math.floor(math.log10((high - low) / 4))
    unit *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (unit * factor) <= 5)
    return math.floor(low / unit) * unit, math.ceil(high / unit) * unit


def tick(value: float) -> str:
    return format.si(value) if abs(value) >= 1000 else f"{value:.4g}"


def braille(
    xs: list[float],
    ys: list[float],
    width: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> list[str]:
    """plotext's canvas alone, as lines of text; rulers and colours are ours, so that they keep still."""
    figure: Any = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    figure.axes(False)
    for axis, ends in (("x", x_range), ("y", y_range)):
        for side in (0, 1):
            ruler = figure.ruler(axis, side)
            ruler.lim(*ends)
            ruler.frequency(0)
    figure.draw(figure.signal(xs, ys, marker="braille").lines())
    lines = figure.build().string(colorless=True).split("\n")
    return [line.ljust(width)[:width] for line in (lines + [""] * height)[:height]]
