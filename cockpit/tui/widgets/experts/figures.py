"""The load statistics of a layer as columns to the right of the map, and the layer's recent history as one line of
bars."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.style import Style

from agents.alerts.training import COLLAPSE, DEAD, DROPPED
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.experts import Shown
from cockpit.data.history.experts import HOT, Figures
from cockpit.tui.drawing.strips import EIGHTHS, StripLine
from cockpit.tui.drawing.theme import Palette


@dataclass(frozen=True)
class LayerLoads:
    """The loads and statistics of the layers in one row of the map. `low` and `high`: the lowest and the highest load
    of each expert, which differ only if the samples of several steps are merged into one. `least` and `most`: the
    lowest and the highest value of each statistic over the layers."""

    low: Sequence[float]
    high: Sequence[float]
    least: Figures
    most: Figures

    @property
    def dead(self) -> int:
        return sum(load < DEAD for load in self.low)

    @property
    def hot(self) -> int:
        return sum(load >= HOT for load in self.high)


@dataclass(frozen=True)
class Column:
    """A column with one load statistic for each row: its heading, its width, and functions that return the statistic as
    text and whether it needs attention."""

    name: str
    width: int
    text: Callable[[LayerLoads], str]
    wrong: Callable[[LayerLoads], bool]


MOST = Column(
    "most",
    8,
    lambda row: f"{format.fixed(max(row.high, default=math.nan), 5, 2)}×",
    lambda row: max(row.high, default=1.0) >= HOT,
)
LEAST = Column(
    "least",
    7,
    lambda row: f"{format.fixed(min(row.low, default=math.nan), 4, 2)}×",
    lambda row: min(row.low, default=1.0) < DEAD,
)
DROP = Column("drop", 8, lambda row: format.percent(row.most.drops, 4), lambda row: row.most.drops >= DROPPED)
EVEN = Column(
    "even", 7, lambda row: format.fixed(row.least.entropy, 4, 2), lambda row: row.least.entropy < COLLAPSE
)
CV = Column("CV", 6, lambda row: format.fixed(row.most.cv, 4, 2), lambda row: False)
DEAD_COUNT = Column("dead", 6, lambda row: _count(row.dead), lambda row: row.dead > 0)
HOT_COUNT = Column("hot", 6, lambda row: _count(row.hot), lambda row: row.hot > 0)

COLUMNS = (MOST, LEAST, DROP, EVEN, CV, DEAD_COUNT, HOT_COUNT)
"""The order on the screen, which is also the order in which they are left out."""
FEWEST = COLUMNS[:3]
MARK = 2  # columns of the mark at the end of a row that needs attention


def _count(number: int) -> str:
    return str(number) if number else "-"


def columns_for(width: int, fewest: Sequence[Column]) -> list[Column]:
    """The columns that fit into `width`; always includes those in `fewest`."""
    found = list(fewest)
    if found:
        for column in COLUMNS[len(found) :]:
            if wide([*found, column]) > width:
                break
            found.append(column)
    return found


def wide(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + (MARK if columns else 0)


def heading(columns: Sequence[Column]) -> str:
    return "".join(column.name.rjust(column.width) for column in columns) + " " * (MARK if columns else 0)


def layer_loads(at: Shown, layers: Sequence[int]) -> LayerLoads:
    """The loads and load statistics of the `layers` that share one row of the map."""
    lows: list[float] = []
    highs: list[float] = []
    for layer in layers:
        low, high = at.row(layer)
        lows += low
        highs += high
    known = [pair for layer in layers if (pair := at.figures(layer))]
    if not known:
        nothing = Figures(*[math.nan] * len(Figures._fields))
        return LayerLoads(lows, highs, nothing, nothing)
    least = Figures(*map(min, zip(*(low for low, _ in known), strict=True)))
    most = Figures(*map(max, zip(*(high for _, high in known), strict=True)))
    return LayerLoads(lows, highs, least, most)


def add_figures(line: StripLine, row: LayerLoads, columns: Sequence[Column], colours: Palette) -> None:
    """Add the statistics of a row to its line."""
    warn = colours.level[Level.WARN]
    wrong = [column.wrong(row) for column in columns]
    for column, bad in zip(columns, wrong, strict=True):
        line.add(column.text(row).rjust(column.width), warn if bad else colours.text)
    if columns:
        line.add(f" {Level.WARN.value if any(wrong) else ' '}", warn)


@dataclass(frozen=True)
class LayerMetric:
    """A load statistic of a layer, such as evenness, that the map can show for each step. `good` and `bad`: the values
    at the two ends of the colour scale."""

    name: str
    title: str
    place: int  # index of the figure in `Figures`
    good: float
    bad: float
    wrong: float  # the value from which it needs attention
    spell: Callable[[float], str]

    @property
    def rises(self) -> bool:
        """Whether a higher value is worse."""
        return self.bad > self.good

    def share(self, value: float) -> float:
        """How bad a value is, from 0 (best) to 1 (worst)."""
        return min(1.0, max(0.0, (value - self.good) / (self.bad - self.good)))

    def is_wrong(self, value: float) -> bool:
        return value >= self.wrong if self.rises else value < self.wrong


HOTTEST = LayerMetric("most", "hottest expert over fair share", 0, 1.0, HOT, HOT, lambda x: f"{x:.2f}×")
METRICS = (
    HOTTEST,
    LayerMetric("drop", "dropped pairs", 3, 0.0, 2 * DROPPED, DROPPED, lambda x: f"{100 * x:.1f} %"),
    LayerMetric("even", "evenness (entropy)", 2, 1.0, COLLAPSE, COLLAPSE, lambda x: f"{x:.3f}"),
    LayerMetric("CV", "spread (standard deviation over mean)", 1, 0.0, 2.0, math.inf, lambda x: f"{x:.2f}"),
    LayerMetric("idle", "experts without a token", 4, 0.0, 8.0, 1.0, lambda x: f"{x:.0f}"),
)

Span = tuple[float, float]
"""The lowest and the highest value of a column."""


def severity(
    span: Span | None, metric: LayerMetric, colours: Palette, tall: int = 1
) -> list[tuple[str, Style]]:
    """One column of a layer's history as a bar, whose cells are returned from top to bottom. The bar shows the worst
    value in the column: a worse value makes it higher and brighter."""
    if span is None:
        return [(" ", colours.faint)] * (tall - 1) + [(format.MISSING, colours.faint)]
    worst = span[1] if metric.rises else span[0]
    share = metric.share(worst)
    style = colours.level[Level.WARN] if metric.is_wrong(worst) else colours.ramp[_ramp(share, colours)]
    eighths = max(1, round(share * tall * 8))
    return [(EIGHTHS[max(0, min(8, eighths - 8 * row))], style) for row in range(tall - 1, -1, -1)]


def _ramp(share: float, colours: Palette) -> int:
    return min(len(colours.ramp) - 1, 2 + int(share * (len(colours.ramp) - 3)))
