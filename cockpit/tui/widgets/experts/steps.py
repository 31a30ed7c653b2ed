"""A map of one load statistic over layers and steps: one row per layer, and one column per step or group of steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.style import Style

from agents.alerts.finding import median
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.experts import Shown
from cockpit.data.history.frames import Frame
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.session import Selection
from cockpit.tui.widgets.experts.figures import LayerMetric, Span, severity
from cockpit.tui.widgets.experts.heat import TALLEST, marked, row_name

NOW = 11  # columns of the value at the end of a row
WIDEST = 4


@dataclass(frozen=True)
class StepMap:
    """A map with layers as rows, and the steps `first` to `last` divided into `columns` equal bins."""

    first: int
    last: int
    columns: int
    frames: Sequence[Frame]
    rows: Sequence[Sequence[int]] = ()
    name: int = 0
    cell: int = 1
    tall: int = 1

    @classmethod
    def whole(cls, at: Shown, width: int, height: int) -> "StepMap":
        """A map of all kept steps, with as many rows as fit."""
        frames = [at.history.figures[number] for number in range(len(at.history.figures))]
        layers = at.history.figures.layers
        per_row = -(-len(layers) // max(1, height - 1))
        rows = [layers[i : i + per_row] for i in range(0, len(layers), per_row)]
        name = max(len(row_name(row)) for row in rows) + 2
        room = max(1, width - name - NOW)
        first, last = frames[0].first, frames[-1].last
        usual = max(
            1, int(median(two.first - one.last for one, two in pairwise(frames)) if frames[1:] else 1)
        )
        columns = max(1, min(room, (last - first) // usual + 1))
        tall = 1 if per_row > 1 else max(1, min(TALLEST, (height - 1) // len(rows)))
        return cls(first, last, columns, frames, rows, name, max(1, min(WIDEST, room // columns)), tall)

    @classmethod
    def recent(cls, at: Shown, columns: int) -> "StepMap":
        """A map whose last column is the shown sample; each column before it is one kept record, oldest first."""
        kept = at.history.figures
        end = kept.find(at.frame.last)
        numbers = range(max(0, end + 1 - columns), end + 1) if end is not None else range(0)
        frames = [kept[number] for number in numbers]
        return cls(0, 0, columns, frames)

    def column_of(self, step: int) -> int:
        inside = max(self.first, min(self.last, step))
        return (inside - self.first) * self.columns // (self.last - self.first + 1)

    def step_beside(self, step: int | None, by: int) -> int | None:
        """The newest step in the column that is `by` columns to the right of the column of `step`. None if that column
        is the newest, because the screen then follows the run."""
        at = self.columns - 1 if step is None else self.column_of(step)
        to = max(0, at + by)
        if to >= self.columns - 1:
            return None
        return self.first + ((to + 1) * (self.last - self.first + 1) - 1) // self.columns

    def spans(self, at: Shown, layers: Sequence[int], metric: LayerMetric) -> list[Span | None]:
        """The lowest and the highest value among `layers` in each column; None for a column of steps of which no record
        is kept."""
        found: list[Span | None] = [None] * self.columns
        one_each = not self.rows
        shift = self.columns - len(self.frames)
        places = [at.history.figures.place(layer, metric.place) for layer in layers]
        for number, frame in enumerate(self.frames):
            lows = [frame.low[place] for place in places if place is not None]
            highs = lows if frame.low is frame.high else [frame.high[p] for p in places if p is not None]
            lows, highs = _known(lows), _known(highs)
            if not lows:
                continue
            low, high = min(lows), max(highs)
            begin = number + shift if one_each else self.column_of(frame.first)
            end = begin if one_each or frame.first == frame.last else self.column_of(frame.last)
            for x in range(begin, end + 1):
                known = found[x]
                found[x] = (min(known[0], low), max(known[1], high)) if known else (low, high)
        return found

    def row(
        self, at: Shown, layers: Sequence[int], metric: LayerMetric, colours: Palette
    ) -> list[tuple[str, Style]]:
        """For each column of steps, a glyph for the worst value among `layers`."""
        return [severity(span, metric, colours)[0] for span in self.spans(at, layers, metric)]

    def draw(self, at: Shown, metric: LayerMetric, selection: Selection, colours: Palette) -> list[StripLine]:
        """The map with its heading above and the ruler of steps below."""
        here = self.columns - 1 if selection.step is None else self.column_of(selection.step)
        step = "newest" if selection.step is None else format.grouped(selection.step)
        lines = [self._head(step, colours)]
        for layers in self.rows:
            lines += self._row(at, layers, metric, selection, here, colours)
        left, right = format.grouped(self.first), format.grouped(self.last)
        wide = self.columns * self.cell
        ruler = StripLine().pad_to(self.name, colours.dim).add(left, colours.dim)
        if wide > len(left) + len(right) + 2:
            ruler.pad_to(self.name + wide - len(right), colours.dim).add(right, colours.dim)
        return [*lines, ruler]

    def _head(self, step: str, colours: Palette) -> StripLine:
        merged = [frame for frame in self.frames if frame.records > 1]
        each = (self.last - self.first + 1) / self.columns
        text = f"a column is {each:.3g} steps: the worst" if each > 1.01 else "a column is a step"
        if merged:
            text += f" · before step {format.grouped(merged[-1].last + 1)} thinned, extremes kept"
        line = StripLine().pad_to(self.name, colours.dim).add(text, colours.dim)
        wide = self.name + self.columns * self.cell + NOW
        return line.pad_to(wide - len(step), colours.dim).add(step, colours.dim)

    def _row(
        self,
        at: Shown,
        layers: Sequence[int],
        metric: LayerMetric,
        selection: Selection,
        here: int,
        colours: Palette,
    ) -> list[StripLine]:
        spans = self.spans(at, layers, metric)
        chosen = selection.layer in layers
        lines = [StripLine() for _ in range(self.tall)]
        for i, line in enumerate(lines):
            text = f"{'▸' if chosen else ' '}{row_name(layers)}" if i == self.tall - 1 else ""
            line.add(text.ljust(self.name), colours.strong if chosen else colours.text)
        for x, span in enumerate(spans):
            for line, (glyph, style) in zip(lines, severity(span, metric, colours, self.tall), strict=True):
                at_cursor = chosen and x == here
                line.add(glyph * self.cell, marked(glyph, style, colours) if at_cursor else style)
        span = spans[here]
        worst = math.nan if span is None else span[1] if metric.rises else span[0]
        text = format.MISSING if math.isnan(worst) else metric.spell(worst)
        wrong = not math.isnan(worst) and metric.is_wrong(worst)
        style = colours.level[Level.WARN] if wrong else colours.text
        lines[-1].add(f"{text:>{NOW - 2}} {Level.WARN.value if wrong else ' '}", style)
        return lines


def _known(values: list[float]) -> list[float]:
    return [value for value in values if value == value]  # NaN is not equal to itself
