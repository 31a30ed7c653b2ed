"""Draws line charts as SVG, and in character cells if plotext is installed."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log10
from typing import Any

Point = tuple[float, float]
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
WIDTH, HEIGHT = 800, 440  # size of an SVG in pixels
LEFT, RIGHT, TOP, BOTTOM = 80, 30, 48, 64


@dataclass(frozen=True)
class Line:
    """A named line; with `marks`, a marker is drawn at each point."""

    name: str
    points: tuple[Point, ...]
    marks: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over a logarithmic x axis; with `log_y` the y axis is logarithmic too."""

    title: str
    x_title: str
    y_title: str
    lines: tuple[Line, ...]
    log_y: bool = False

    def x(self, value: float) -> float:
        return log10(value)

    def y(self, value: float) -> float:
        return log10(value) if self.log_y else value

    @property
    def ends(self) -> tuple[float, float, float, float]:
        """The ranges of the axes: lowest and highest x, then lowest and highest y. Values on a logarithmic axis are
        given as logarithms. A linear y axis begins at 0."""
        xs = [self.x(x) for line in self.lines for x, _ in line.points]
        ys = [self.y(y) for line in self.lines for _, y in line.points]
        low, high = (min(ys), max(ys) + 0.15) if self.log_y else (0.0, 1.05 * max(ys))
        return min(xs), max(max(xs), min(xs) + 1e-9), low, max(high, low + 1e-9)

    def x_ticks(self) -> list[float]:
        """The x values at which the axis has ticks: those of the markers if there are 3 to 10 of them, else powers of
        ten."""
        marked = sorted({x for line in self.lines if line.marks for x, _ in line.points})
        return marked if 2 < len(marked) <= 10 else powers(*self.ends[:2])

    def y_ticks(self) -> list[float]:
        _, _, low, high = self.ends
        if self.log_y:
            return powers(low, high)
        step = 10 ** int(log10(high) // 1)
        step = next(s for s in (step / 5, step / 2, step, 2 * step) if high / s <= 6)
        return [step * n for n in range(int(high / step) + 1)]


def powers(low: float, high: float) -> list[float]:
    """At most eight powers of ten between 10^low and 10^high."""
    first, last = int(-(-low // 1)), int(high // 1)
    every = max(1, -(-(last - first + 1) // 8))
    return [10.0**n for n in range(first, last + 1, every)]


def number(value: float) -> str:
    """The axis label of a value, such as 40k or 0.5."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.4g}"


def has_plotext() -> bool:
    return importlib.util.find_spec("plotext") is not None


def cells(chart: Chart, width: int = 80, height: int = 18) -> list[str]:
    """The chart as lines of text: the plot in a frame, labels at the ends of the axes, and a legend."""
    import plotext

    low_x, high_x, low_y, high_y = chart.ends
    labels = [number(10**y if chart.log_y else y) for y in (high_y, low_y)]
    margin = max(map(len, labels)) + 1
    figure: Any = plotext.figure
    plotext.terminal.limit(False, False)  # do not limit the plot to the terminal's size
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width - margin - 1, height)
    figure.axes(False)
    for axis, ends in (("x", (low_x, high_x)), ("y", (low_y, high_y))):
        for side in (0, 1):
            ruler = figure.ruler(axis, side)
            ruler.lim(*ends)
            ruler.frequency(0)
    markers = iter("abcdefgh")
    legend = []
    for line in chart.lines:
        xs, ys = [chart.x(x) for x, _ in line.points], [chart.y(y) for _, y in line.points]
        if line.marks:
            marker = next(markers)
            figure.draw(figure.signal(xs, ys, marker=marker))
            legend.append(f"{marker} {line.name}")
        else:
            figure.draw(figure.signal(xs, ys, marker="braille").lines())
    rows = figure.build().string(colorless=True).split("\n")
    rows = [row.ljust(width - margin - 1)[: width - margin - 1] for row in (rows + [""] * height)[:height]]
    heads = [labels[0], *[""] * (height - 2), labels[1]]
    framed = [f"{head:>{margin - 1}} │{row}".rstrip() for head, row in zip(heads, rows, strict=True)]
    left, right = number(10**low_x), number(10**high_x)
    ruler_text = f"{left}{chart.x_title:^{width - margin - 1 - len(left) - len(right)}}{right}"
    return [
        f"{chart.y_title}",
        *framed,
        " " * margin + "└" + "─" * (width - margin - 1),
        " " * (margin + 1) + ruler_text,
        *legend,
    ]


def svg(chart: Chart) -> str:
    """The chart as an SVG document."""
    low_x, high_x, low_y, high_y = chart.ends
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (chart.x(x) - low_x) / (high_x - low_x) * wide,
            TOP + high - (chart.y(y) - low_y) / (high_y - low_y) * high,
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 18, chart.title, "middle", 'font-weight="bold"'),
        _text(LEFT + wide / 2, HEIGHT - 8, chart.x_title, "middle"),
        _text(
            16, TOP + high / 2, chart.y_title, "middle", f'transform="rotate(-90 16 {TOP + high / 2:.0f})"'
        ),
    ]
    base = 10**low_y if chart.log_y else low_y
    for tick in chart.x_ticks():
        x, y = place(tick, base)
        parts += [
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{y:.1f}" stroke="#ddd"/>',
            _text(x, y + 16, number(tick), "middle"),
        ]
    for tick in chart.y_ticks():
        x, y = place(10**low_x, tick)
        parts += [
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{LEFT + wide}" y2="{y:.1f}" stroke="#ddd"/>',
            _text(x - 6, y + 4, number(tick), "end"),
        ]
    for n, line in enumerate(chart.lines):
        colour = COLOURS[n % len(COLOURS)]
        places = [place(*point) for point in line.points]
        if len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if line.marks:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
    parts += _legend(chart.lines)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(lines: Sequence[Line]) -> list[str]:
    """The legend, in one row above the chart."""
    parts, x = [], float(LEFT)
    for n, line in enumerate(lines):
        colour = COLOURS[n % len(COLOURS)]
        parts += [
            f'<rect x="{x:.0f}" y="30" width="12" height="4" fill="{colour}"/>',
            _text(x + 16, 36, line.name, "start"),
        ]
        x += 30 + 6.6 * len(line.name)
    return parts


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
