"""Panel with a curve of one metric over steps, decimated to the width, with a mark at each knob change."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import plotext
from textual.binding import Binding

from agents.protocol import Summary
from agents.state.metric_curve import Point
from cockpit.data import format
from cockpit.data.diagnosis import Level
from cockpit.data.metric_curves import Segment, clamp, extent, pan, polylines, segments, zoom
from cockpit.data.run_log import Mark, marks
from cockpit.data.store import Store, Topic
from cockpit.tui.keys import CURVES, CURVES_KEYS
from cockpit.tui.strips import StripLine
from cockpit.tui.theme import Palette
from cockpit.tui.widgets.panel import Panel


@dataclass(frozen=True)
class Series:
    """A metric of the whole job over steps."""

    key: str
    title: str
    unit: str
    metric: str  # of `agents.state.metric_curve.METRICS`
    get: Callable[[Summary], float | None]


LOSS = Series("loss", "Loss", "", "loss", lambda summary: summary.loss)
THROUGHPUT = Series("throughput", "Throughput", "tok/s", "tokens_per_s", lambda summary: summary.tokens_per_s)


class CurvePanel(Panel):
    """The curve of one metric, over the whole run or the steps in view."""

    TOPICS = frozenset({Topic.CURVES})
    TITLE = "Curve"
    BINDINGS: ClassVar[list[Binding]] = CURVES_KEYS  # type: ignore[assignment]
    ACTIONS = CURVES
    HELP = (
        "One metric of the job over steps. `╷` marks a knob change; the newest change is written below. A column shows "
        "the lowest and the highest value of its steps. The line has gaps where steps are missing; `✗` marks values "
        "that are not finite. A live screen keeps older steps as buckets of equal size: where a bucket is wider than "
        "a column, `╌` runs under it, and the line joins its first, lowest, highest and last value. A replay reads "
        "every step in view from the recording."
    )
    EVERY = 3  # less than three times a second: a curve costs more time than the rest of the screen

    def __init__(self, series: Series) -> None:
        super().__init__(series.key)
        self.series = series

    def title(self, store: Store) -> str:
        summary = store.summary
        now = self.series.get(summary) if summary else None
        spelled = format.MISSING if now is None else (f"{now:.3f}" if abs(now) < 1000 else format.si(now))
        return f"{self.series.title} · {spelled} {self.series.unit}".rstrip()

    def subtitle(self, store: Store) -> str:
        changes = marks(store)
        return f"╷ step {format.grouped(changes[-1].step)}: {changes[-1].label}" if changes else ""

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        found = segments(store.state, self.series.metric, store.view, store.detail)
        if sum(len(one.points) for one in found) < 2:
            why = "no two of these steps are known · 0 shows all" if store.view else _NOT_YET
            return [StripLine().add(f"{format.MISSING} {why}", colours.faint)]
        return plot(found, marks(store), width, height, colours)

    # -------------------------------------------------------------------------------------- view

    def action_scale(self, by: float) -> None:
        with self._store.lock:
            whole = extent(self._store.state)
            if whole:
                self._store.set_view(clamp(zoom(self._store.view or whole, by), whole))
        self.redraw()

    def action_pan(self, by: float) -> None:
        with self._store.lock:
            whole, view = extent(self._store.state), self._store.view
            if whole and view:
                self._store.set_view(clamp(pan(view, by), whole))
        self.redraw()

    def action_all(self) -> None:
        with self._store.lock:
            self._store.set_view(None)
        self.redraw()


_NOT_YET = "the curve begins with the second step"


def plot(
    found: Sequence[Segment], marks: Sequence[Mark], width: int, height: int, colours: Palette
) -> list[StripLine]:
    """The curve with both axes, in `width` x `height` cells."""
    axis, rows = 8, height - 1
    if rows < 1 or width < axis + 8:
        return []
    columns = width - axis
    first, last = found[0].points[0][0], found[-1].points[-1][0]
    a_step = columns / max(1, last - first)

    def column(step: int) -> int:
        return min(columns - 1, int((step - first) * a_step))

    lines_of = [decimate(run, first, last, columns) for run in polylines(found, a_step)]
    values = [value for line in lines_of for _, value in line]
    low, high = nice_range(min(values), max(values)) if values else (0.0, 1.0)
    canvas = braille(lines_of, columns, rows, (first, max(last, first + 1)), (low, high))
    at_mark = {column(mark.step) for mark in marks if first <= mark.step <= last}
    broken = {column(step) for one in found for step, value in one.points if not math.isfinite(value)}
    lines = []
    labelled = {0: high, rows - 1: low} | (
        {rows // 2: high - (high - low) * (rows // 2) / (rows - 1)} if rows > 4 else {}
    )
    for y in range(rows):
        label = f"{tick(labelled[y])} ┤" if y in labelled else "│"
        line = StripLine().add(label.rjust(axis), colours.dim)
        for x, glyph in enumerate(canvas[y]):
            marked = x in at_mark and glyph == " "
            if y == rows - 1 and x in broken:
                line.add(Level.BAD.value, colours.level[Level.BAD])
            else:
                line.add("╷" if marked else glyph, colours.mark if marked else colours.curve)
        lines.append(line)
    bucketed = [False] * columns
    coarse = [one for one in found if one.width > max(1, 1 / a_step)]
    for one in coarse:
        begin, end = column(one.points[0][0]), column(one.points[-1][0])
        bucketed[begin : end + 1] = [True] * (end + 1 - begin)
    widest = max((one.width for one in coarse), default=0)
    left, right = format.grouped(first), format.grouped(last)
    note = f"╌ lowest and highest of {format.grouped(widest)} steps" if widest else ""
    under = "".join("╌" if here else " " for here in bucketed)[len(left) : columns - len(right)]
    if note and len(note) + 4 <= len(under):
        under = f"{under[:2]} {note} {under[len(note) + 4 :]}"
    ruler = StripLine().add("└".rjust(axis), colours.dim).add(left, colours.dim).add(under, colours.faint)
    lines.append(ruler.pad_to(width - len(right), colours.faint).add(right, colours.dim))
    return lines


def decimate(run: Sequence[Point], first: int, last: int, columns: int) -> list[Point]:
    """Keep the lowest and the highest point of each column, and both ends of the run: plotext takes 40 us a point."""
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
    """A range with round limits, so that the scale changes rarely."""
    if high - low < 1e-12:
        pad = abs(high) * 0.05 or 1.0
        return low - pad, high + pad
    unit = 10 ** math.floor(math.log10((high - low) / 4))
    unit *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (unit * factor) <= 5)
    return math.floor(low / unit) * unit, math.ceil(high / unit) * unit


def tick(value: float) -> str:
    return format.si(value) if abs(value) >= 1000 else f"{value:.4g}"


def braille(
    polylines: Sequence[Sequence[Point]],
    width: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> list[str]:
    """Draw each of `polylines` with plotext and return its canvas as lines of text. Axes and colours are drawn by the
    panel, so that they do not move."""
    figure: Any = plotext.figure
    plotext.terminal.limit(False, False)  # plotext would cut the canvas to its own guess of the terminal size
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    figure.axes(False)
    for axis, ends in (("x", x_range), ("y", y_range)):
        for side in (0, 1):
            ruler = figure.ruler(axis, side)
            ruler.lim(*ends)
            ruler.frequency(0)
    for run in polylines:
        xs, ys = [float(step) for step, _ in run], [value for _, value in run]
        figure.draw(figure.signal(xs, ys, marker="braille").lines())
    lines = figure.build().string(colorless=True).split("\n") if polylines else []
    return [line.ljust(width)[:width] for line in (lines + [""] * height)[:height]]
