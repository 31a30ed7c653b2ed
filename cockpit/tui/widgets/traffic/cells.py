"""Draws the cells of the matrix. The colour shows the bytes of a pair relative to the mean over pairs with traffic; the
number is shown if there is room.
"""

from functools import cached_property, lru_cache

from rich.style import Style

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.traffic.traffic import UNBALANCED, byte_unit
from cockpit.tui.drawing.contrast import ink_on
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import SOLID, Palette
from cockpit.tui.widgets.traffic.view import Cells, Plan, View

GLYPHS = "░░▒▒▒▓██"  # one per bin of `Palette.deviation`, so that cells differ without colour too
HATCH = "╱"
SELF = "╲"
CURSOR = "◆"
FILTERED = "╌"  # a pair that is not between two ranks of the filter
SCALE = 4  # bins are this many times as wide as those for times, because bytes vary more
TOTAL = 8  # width of the column with the sums of rows


def pair_bin(over_mean: float) -> int:
    """The index in the colour scale for a pair of ranks or nodes. `over_mean`: the bytes that the first sends to the
    second, relative to the mean over pairs with traffic."""
    return Palette.bin((over_mean - 1) / SCALE)


class Drawing:
    """Draws the rows of the matrix. `label`: width of the row names; `unit`: name of the unit and its size in bytes;
    `cursor`: row and column of the cursor; `same`: whether a row and a column with the same index are the same rank,
    which sends nothing to itself."""

    def __init__(
        self,
        view: View,
        shown: Plan,
        found: Cells,
        colours: Palette,
        label: int,
        unit: tuple[str, float],
        cursor: tuple[int, int] | None,
        same: bool,
    ) -> None:
        self.view, self.shown, self.found, self.colours = view, shown, found, colours
        self.label, self.cursor, self.same = label, cursor, same
        self.scale = unit[1]
        # The heading of the sums also gives the unit of the numbers in the cells.
        most = max((size for size in found.sent if size), default=1)
        self.total_unit, self.total_scale = unit if shown.numbers else byte_unit(most)
        self.totals = True
        # indices of the rows and columns in which the filter selects no rank
        self.rows_out: frozenset[int] = frozenset()
        self.columns_out: frozenset[int] = frozenset()

    def head(self) -> StripLine:
        """The line with the names of the columns, as far as they fit."""
        shown, colours = self.shown, self.colours
        line = StripLine().add("from╲to".rjust(self.label - 1)[-self.label + 1 :] + " ", colours.faint)
        for at in range(shown.width):
            name = self.view.label(shown.column(at))
            style = colours.strong if self.cursor and at == self.cursor[1] else colours.dim
            if at in self.columns_out and style is colours.dim:
                style = colours.faint
            room = shown.cell
            if shown.numbers:
                line.add(name.rjust(room)[-room:], style)
            elif line.width <= self.label + at * shown.cell:
                line.pad_to(self.label + at * shown.cell, colours.dim)
                if line.width + len(name) + 1 <= self.label + shown.width * shown.cell:
                    line.add(f"{name} ", style)
        line.pad_to(self.label + shown.width * shown.cell, colours.dim)
        return line.add(f"sent {self.total_unit}".rjust(TOTAL), colours.dim) if self.totals else line

    def row(self, at: int) -> StripLine:
        shown, colours, found = self.shown, self.colours, self.found
        here = self.cursor is not None and self.cursor[0] == at
        name = self.view.label(shown.row(at)) + (
            "~" if found.missing[at] and found.sent[at] is not None else ""
        )
        plain = colours.faint if at in self.rows_out else colours.dim
        line = StripLine().add(
            name[: self.label - 1].rjust(self.label - 1) + " ", colours.strong if here else plain
        )
        # Most cells of a large matrix are empty, so those between two others are added at once.
        empty, next_ = self._empty(at), 0
        for column in self._special[at]:
            line.add(empty * (column - next_), colours.faint)
            self._cell(line, at, column)
            next_ = column + 1
        line.add(empty * (shown.width - next_), colours.faint)
        if self.totals:
            self._sum(line, found.sent[at])
        return line

    @cached_property
    def _special(self) -> list[list[int]]:
        """For each row, the ascending column indices of the cells that are not drawn as empty: cells with traffic, the
        cell under the cursor, and the cell on the diagonal."""
        columns: list[set[int]] = [set() for _ in range(self.shown.height)]
        for row, column in (*self.found.largest, *self._own.items(), *([self.cursor] if self.cursor else [])):
            columns[row].add(column)
        return [sorted(one) for one in columns]

    @cached_property
    def _own(self) -> dict[int, int]:
        """The diagonal: for each row, the column of the same rank or node. Empty if several pairs share a cell."""
        if not self.same or self.shown.folded:
            return {}
        column_of = {place: column for column, place in enumerate(self.shown.columns)}
        return {row: column_of[place] for row, place in enumerate(self.shown.rows) if place in column_of}

    def received(self) -> StripLine:
        """The line below the matrix with the bytes that each column received, as numbers or as colours."""
        shown, colours, found = self.shown, self.colours, self.found
        line = StripLine().add("received ".rjust(self.label)[-self.label :], colours.dim)
        busy = [size for size in found.received if size]
        mean = sum(busy) / len(busy) if busy else 0.0
        for size in found.received:
            over = size / mean if mean else 0.0
            if shown.numbers:
                style = colours.level[Level.WARN] if over >= UNBALANCED else colours.dim
                line.add(f" {format.fixed(size / self.scale, shown.cell - 1)}", style)
            else:
                bin = pair_bin(over)
                line.add((GLYPHS[bin] if size else " ") * shown.cell, _shade(bin, colours))
        return line

    @cached_property
    def _mean(self) -> float:
        """The mean of the bytes sent (`Cells.sent`) over the rows whose ranks or nodes sent anything."""
        busy = [size for size in self.found.sent if size]
        return sum(busy) / len(busy) if busy else 0.0

    def _sum(self, line: StripLine, size: int | None) -> None:
        high = bool(size and size >= UNBALANCED * self._mean)
        style = self.colours.level[Level.WARN] if high else self.colours.dim
        line.add(format.fixed(None if size is None else size / self.total_scale, TOTAL), style)

    def _cell(self, line: StripLine, row: int, column: int) -> None:
        shown, colours = self.shown, self.colours
        pair = self.found.largest.get((row, column))
        chosen = self.cursor == (row, column)
        width = shown.cell
        if pair is None:
            own = self._own.get(row) == column and self.found.sent[row] is not None
            text = SELF.rjust(width) if own else self._empty(row)
            line.add(text, colours.cursor if chosen else colours.faint)
            return
        bin = pair_bin(pair.bytes / self.view.usual(pair))
        if (row in self.rows_out or column in self.columns_out) and not chosen:
            line.add(FILTERED.rjust(width) if shown.numbers else FILTERED * width, colours.faint)
        elif shown.numbers:
            number = format.fixed(pair.bytes / self.scale, width - 1)
            line.add(" ", colours.text)
            line.add(number, colours.cursor if chosen else _heat(colours.deviation[bin]))
        elif chosen:
            line.add(CURSOR.ljust(width), colours.cursor)
        else:
            line.add(GLYPHS[bin] * width, _shade(bin, colours))

    def _empty(self, row: int) -> str:
        """The text of a cell without traffic: hatched if no rank of the row was sampled, otherwise zero."""
        width = self.shown.cell
        if self.found.sent[row] is None:
            text = HATCH * max(1, width - 1)
            return text.rjust(width) if self.shown.numbers else HATCH * width
        return format.fixed(0.0, width, 0) if self.shown.numbers else " " * width


def _shade(bin: int, colours: Palette) -> Style:
    """The style of a cell that shows no number: glyph and background have the same colour or, on a terminal with few
    colours, only the glyph is coloured."""
    style = colours.deviation[bin]
    return _solid(style) if colours.fills == SOLID else style


@lru_cache(maxsize=64)
def _solid(style: Style) -> Style:
    return Style(color=style.color, bgcolor=style.color)


@lru_cache(maxsize=64)
def _heat(style: Style) -> Style:
    """The style of a number in a coloured cell: the foreground colour of `style` as background, and black or white
    text."""
    assert style.color is not None
    return Style(color=ink_on(style.color.get_truecolor().hex), bgcolor=style.color)


def legend(view: View, colours: Palette, shown: Plan, missing: int) -> StripLine:
    """The legend: what the colours mean, and what a cell shows."""
    line = StripLine().add("less ", colours.dim)
    for bin, glyph in enumerate(GLYPHS):
        line.add(glyph, _shade(bin, colours))
    line.add(" more", colours.dim)
    if shown.folded:
        line.add(f" · hottest of {shown.down}×{shown.across} pairs", colours.text)
    else:
        line.add(" than the mean pair", colours.dim)
    return line.add(f" · {HATCH * 2} not sampled" if missing else "", colours.dim)
