"""Draws one chart of the curves screen: a heading with values, the lines of one or more runs, and markers for off-scale
values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from rich.style import Style

from agents.state.metric_curves import Point
from cockpit.data import format
from cockpit.data.comparison.compared_runs import By, RunCurves
from cockpit.data.curves.job_metrics import CurveMetric, change
from cockpit.data.curves.segments import Reading, Segment, polylines, reading, segments, smoothed
from cockpit.data.scale import Range, Scale, choose
from cockpit.tui.drawing.chart import DASHED, DOTTED, SOLID, SPARSE, Dash, Place, XAxis
from cockpit.tui.drawing.chart_lines import AXIS, Layer, Line, Overlay, chart_rows, draw_lines
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette

LETTERS = "ABCDE"
NAME = 21  # width of a metric's title
VALUE = 8


@dataclass(frozen=True)
class Look:
    """How the curves of one run are drawn. Without colour, the dash pattern and the letter distinguish the runs."""

    letter: str
    style: Style
    dash: Dash = SOLID

    @property
    def sample(self) -> str:
        """A short piece of the run's line, for the legend."""
        return {SOLID: "⠤⠤⠤", DOTTED: "⠄⠄⠄", DASHED: "⠤⠤ ", SPARSE: "⠄ ⠄"}[self.dash]


def looks(colours: Palette) -> list[Look]:
    """The line styles of this run and of the compared runs."""
    return [
        Look("A", colours.curve),
        Look("B", colours.mark, DOTTED),
        Look("C", colours.curve_alt, DASHED),
        Look("D", colours.strong, SPARSE),
        Look("E", colours.dim, DOTTED),
    ]


@dataclass(frozen=True)
class Frame:
    """The data that all charts share, such as the x axis, the runs, the cursor and the half-life of the average."""

    axis: XAxis
    by: By
    runs: Sequence[RunCurves]  # the screen's own run is first
    step: int | None  # the step under the cursor
    half_life: int | None
    overlay: Overlay
    colours: Palette

    @property
    def here(self) -> int | None:
        """The step whose values the headings show: the step under the cursor or, without a cursor, the newest step."""
        return self.step if self.step is not None else self.runs[0].last


@dataclass(frozen=True)
class Chart:
    """The curves of one metric, one for each run, and the braille cells drawn for them. A chart does not depend on the
    cursor."""

    metric: CurveMetric
    segments: Sequence[Sequence[Segment]]
    averages: Sequence[Sequence[Sequence[Place]]]  # polylines by run, in the metric's unit over the x axis
    scale: Scale
    outer: bool  # whether outer values are off the scale
    layers: Sequence[Layer]
    extremes: str  # the lowest and the highest visible value of this run
    broken: frozenset[int]  # columns with a value that is not finite


def chart_of(metric: CurveMetric, frame: Frame, rows: int, log: bool, mode: Range) -> Chart:
    """Collect the points of a metric that are in view, and draw them in `rows` rows."""
    found, lines, averages = [], [], []
    for run in frame.runs:
        store = run.store
        own = segments(store.state, metric.key, store.curve_view.steps, store.curve_view.detail)
        runs = list(polylines(own, _columns_per_step(run, frame)))
        found.append(own)
        lines.append([_placed(line, metric, run, frame) for line in runs])
        mean = smoothed(runs, frame.half_life) if frame.half_life else []
        averages.append([_placed(line, metric, run, frame) for line in mean])
        if run is frame.runs[0]:
            extremes = _extremes(runs, metric)
    scale, outer = choose([value for of_run in lines for line in of_run for _, value in line], mode, log)
    layers: list[Line] = []
    for number, look in reversed(list(enumerate(looks(frame.colours)[: len(frame.runs)]))):
        if averages[number]:
            raw = frame.colours.dim if number == 0 else look.style
            layers.append(Line(lines[number], raw, DOTTED if number == 0 else SPARSE))
            layers.append(Line(averages[number], look.style, look.dash))
        else:
            layers.append(Line(lines[number], look.style, look.dash))
    drawn = draw_lines(layers, frame.axis, rows, scale)
    odd = [step for one in found[0] for step, value in one.points if not math.isfinite(value)]
    places = [frame.runs[0].progress.x(frame.by, step) for step in odd]
    broken = frozenset(frame.axis.column(x) for x in places if x is not None)
    return Chart(metric, found, averages, scale, outer, drawn, extremes, broken)


def _extremes(lines: Sequence[Sequence[Point]], metric: CurveMetric) -> str:
    """Text with the lowest and the highest visible value, and the step of each. The two values are exact, although the
    curve is downsampled, because each bucket keeps its minimum and maximum."""
    points = [of(line, key=itemgetter(1)) for line in lines for of in (min, max)]
    if sum(map(len, lines)) < 2:
        return ""
    return " · ".join(
        f"{of.__name__} {metric.text(value * metric.factor)} at {format.grouped(step)}"
        for of in (min, max)
        for step, value in (of(points, key=itemgetter(1)),)
    )


def _columns_per_step(run: RunCurves, frame: Frame) -> float:
    """The width of one step in chart columns. A chart line is interrupted only at gaps between points that are wider
    than a column."""
    if frame.by is By.TOKENS:
        return frame.axis.dots / 2 * (run.progress.tokens or 1)
    if frame.by is By.TIME and run.progress.seconds:
        steps = run.progress.steps[-1] - run.progress.steps[0]
        return frame.axis.dots / 2 * run.progress.seconds[-1] / max(1, steps)
    return frame.axis.dots / 2


def _placed(line: Sequence[Place], metric: CurveMetric, run: RunCurves, frame: Frame) -> list[Place]:
    """The points of a line, with x values in the unit of the x axis and y values in the metric's unit. Points outside
    the range of the axis are omitted."""
    factor, by, axis = metric.factor, frame.by, frame.axis
    if by is By.STEP:
        placed = [(step, value * factor) for step, value in line] if factor != 1 else list(line)
    else:
        x = run.progress.x
        placed = [(at, value * factor) for step, value in line if (at := x(by, step)) is not None]
    if not placed or (axis.first <= placed[0][0] and placed[-1][0] <= axis.last):
        return placed
    return [point for point in placed if axis.first <= point[0] <= axis.last]


def chart_lines(
    chart: Chart, frame: Frame, rows: int, log: bool, mode: Range, current: bool
) -> list[StripLine]:
    """The heading of a chart, followed by its `rows` rows."""
    colours = frame.colours
    notes = [
        "log" if log else "",
        f"{mode.value}: outer 1 % off" if chart.outer else (mode.value if mode is not Range.AUTO else ""),
        chart.extremes,
    ]
    heading = _heading(chart, frame, current, [note for note in notes if note])
    if not any(one.points for found in chart.segments for one in found):
        why = "no values in view" if frame.runs[0].store.curve_view.steps else "the run does not report it"
        return [heading, StripLine().add(f"  {format.MISSING} {why}", colours.faint)]
    over = Overlay(frame.overlay.verticals, (), frame.overlay.cursor, chart.broken)
    return [heading, *chart_rows(chart.layers, frame.axis, rows, chart.scale, over, colours)]


def _heading(chart: Chart, frame: Frame, current: bool, notes: list[str]) -> StripLine:
    """The heading of a chart, such as ``▸ Loss                  2.113  average 2.120   B 2.301 (-8.2 %)   log``."""
    colours, metric = frame.colours, chart.metric
    line = StripLine().add("▸ " if current else "  ", colours.accent)
    line.add(f"{metric.title:<{NAME}}", colours.strong if current else colours.text)
    step = frame.here
    own = None if step is None else value_at(frame.runs[0], chart.segments[0], metric, step)
    if len(frame.runs) > 1:
        line.add("A ", colours.curve)
    text, unit = reading_text(own, metric)
    line.add(text.rjust(VALUE), colours.strong).add(f" {unit:<5}", colours.dim)
    if frame.half_life and step is not None and (mean := _average_at(chart, frame, step)) is not None:
        line.add("  average ", colours.dim).add(metric.text(mean).rjust(VALUE), colours.text)
    for run, found, look in list(zip(frame.runs, chart.segments, looks(colours), strict=False))[1:]:
        other = _other_value(run, found, metric, frame)
        line.add(f"  {look.letter} ", look.style)
        line.add(" ".join(reading_text(other, metric)).rjust(VALUE), colours.text)
        if own and other and own.width == other.width == 1 and (relative := change(other.low, own.low)):
            line.add(f" (A {relative})", colours.dim)
    room = frame.axis.columns + AXIS - line.width - 2
    while notes and len(" · ".join(notes)) > room:
        notes.pop()
    text = " · ".join(notes)
    return line.pad_to(frame.axis.columns + AXIS - len(text) - 1, colours.text).add(text, colours.faint)


def _other_value(
    run: RunCurves, found: Sequence[Segment], metric: CurveMetric, frame: Frame
) -> Reading | None:
    """The value of another run at the x position of the cursor or, without a cursor, at the x position of this run's
    newest step."""
    here = frame.here
    x = None if here is None else frame.runs[0].progress.x(frame.by, here)
    step = None if x is None else run.progress.step(frame.by, x)
    return None if step is None else value_at(run, found, metric, step)


def _average_at(chart: Chart, frame: Frame, step: int) -> float | None:
    """The moving average at the last step up to `step` that has an average."""
    x = frame.runs[0].progress.x(frame.by, step)
    before = [value for line in chart.averages[0] for at, value in line if x is not None and at <= x]
    return before[-1] if before else None


def value_at(run: RunCurves, found: Sequence[Segment], metric: CurveMetric, step: int) -> Reading | None:
    """The value of a metric at a step, in the metric's unit; if the step is in a bucket of several steps, the lowest
    and highest value in the bucket. `found`: the segments of the metric's curve over the steps in view; the value of a
    step outside the view is read from the run instead.
    """
    view = run.store.curve_view.steps
    if view and not view[0] <= step <= view[1]:
        return run.reading(metric, step)
    one = reading(found, step)
    return one and Reading(one.low * metric.factor, one.high * metric.factor, one.width)


def reading_text(one: Reading | None, metric: CurveMetric) -> tuple[str, str]:
    """A metric's value at a step as text, and its unit. The text is ``2.113``, ``2.113..2.240`` (lowest and highest
    value of a bucket), or `·` if there is no value."""
    if one is None:
        return format.MISSING, metric.unit
    text, whole = metric.text(one.high), metric.with_unit(one.high)
    unit = whole[len(text) :].strip()
    if whole.startswith(text) and unit == "B" and text[-1] in "kMGT":
        text, unit = text[:-2], f"{text[-1]}B"
    return text if one.width == 1 else f"{metric.text(one.low)}..{text}", unit
