"""The map of layers and experts: how layers and experts share cells, and how the cells are drawn."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from rich.style import Style

from agents.alerts.training import DEAD
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.experts import Cell, Shown
from cockpit.data.history.experts import HOT
from cockpit.tui.drawing.strips import StripLine, column
from cockpit.tui.drawing.theme import DEVIATION_EDGES, Palette
from cockpit.tui.widgets.experts.figures import FEWEST, Column, columns_for, wide

# load relative to the fair share at which a bar has full height; at the fair share it has half the height
FULL = 2.0
BAR = " ▁▂▃▄▅▆▇█"
DEAD_GLYPH, HOT_GLYPH, BOTH_GLYPH, CELL_GLYPH = "╳", "▲", "◆", "▀"
EDGES = tuple(1 + 4 * edge for edge in DEVIATION_EDGES)
WIDEST = 8  # columns of a cell
TALLEST = 5  # lines of a row


def load_bin(ratio: float) -> int:
    """The index in the colour scale for a load relative to the mean. Each colour covers a range four times as wide as
    for durations, because loads vary more."""
    return bisect_right(EDGES, ratio) if ratio >= DEAD else 0


@dataclass(frozen=True)
class Fold:
    """The layout of the map: which layers share a row, how many experts share a cell, and the sizes of rows, cells,
    names and columns of statistics, in terminal cells."""

    rows: Sequence[Sequence[int]]  # the layers of each row
    across: int  # experts per cell
    cells: int  # cells per row
    name: int  # columns of the names of the layers
    cell: int  # columns per cell
    tall: int  # lines per row
    columns: Sequence[Column]  # figures at the right
    trend: int  # columns of the history of the hottest expert; 0: none
    marks: bool  # whether a mark before the name shows the row of the cursor

    @property
    def down(self) -> int:
        """The number of layers per cell."""
        return max(map(len, self.rows), default=1)

    @property
    def wide(self) -> int:
        """The width of a row's name and cells, in terminal columns."""
        return self.name + self.cells * self.cell

    def held(self) -> str:
        """How many layers and experts share a cell, such as ``2 layers × 4 experts``; empty if no cell is shared."""
        words = [f"{self.down} layers"] * (self.down > 1) + [f"{self.across} experts"] * (self.across > 1)
        return " × ".join(words)

    def row_of(self, layer: int) -> int | None:
        return next((y for y, layers in enumerate(self.rows) if layer in layers), None)


def fold(layers: Sequence[int], count: int, width: int, height: int, whole: bool = False) -> Fold:
    """Fit a map of `layers`, with `count` experts each, into `width` x `height` terminal cells. `whole`: leave a column
    for the cursor and, if the width allows, room beside each row for the highest load in the last samples."""
    per_row = -(-len(layers) // max(1, height))
    rows = [layers[i : i + per_row] for i in range(0, len(layers), per_row)]
    name = max(len(row_name(row)) for row in rows) + 1 + whole
    fewest = _fewest(count, width - name)
    room = max(1, width - name - wide(fewest))
    across = -(-count // room)
    cells = -(-count // across)
    cell = max(1, min(WIDEST, room // cells))
    columns = columns_for(width - name - cells * cell, fewest)
    left = width - name - cells * cell - wide(columns) - 2
    trend = min(48, left) if whole and left >= 8 else 0
    tall = 1 if per_row > 1 or across > 1 else max(1, min(TALLEST, height // len(rows)))
    return Fold(rows, across, cells, name, cell, tall, columns, trend, whole)


def _fewest(count: int, width: int) -> Sequence[Column]:
    """The columns of load statistics beside the map: the longest prefix of `FEWEST` that leaves room for one cell for
    each of the `count` experts. If one cell per expert does not fit even without these columns, experts share cells.
    The result is then all of `FEWEST` if this leaves at least 8 cells for the map; else the first column, if `width` is
    at least 15; else no column."""
    for number in range(len(FEWEST), -1, -1):
        if count <= width - wide(FEWEST[:number]):
            return FEWEST[:number]
    return FEWEST if wide(FEWEST) + 8 <= width else FEWEST[:1] * (width >= 15)


def row_name(layers: Sequence[int]) -> str:
    return f"L{layers[0]}" + (f"-{layers[-1]}" if len(layers) > 1 else "")


@dataclass
class Heat:
    """Draws the load of every expert from one kept record (of a step or of several merged steps), in the map layout
    `fold`. `order`: for each layer, its experts from left to right; a layer without an entry shows its experts by
    index."""

    at: Shown
    fold: Fold
    colours: Palette
    order: dict[int, list[int]] = field(default_factory=dict)

    def row(self, y: int, cursor: int | None) -> list[StripLine]:
        """The lines of row `y`, without its load statistics. `cursor`: the cell under the cursor."""
        fold, colours = self.fold, self.colours
        layers = fold.rows[y]
        tall = fold.tall
        gap = 1 if fold.cell > 2 else 0
        lines = [StripLine() for _ in range(tall)]
        here = "▸" if cursor is not None else " " if fold.marks else ""
        for i, line in enumerate(lines):
            text = f"{here}{row_name(layers)}" if i == tall - 1 else ""
            line.add(text.ljust(fold.name), colours.strong if cursor is not None else colours.text)
        for x, (low, high) in enumerate(self._extremes(layers)):
            glyphs = self._glyphs(low, high)
            for line, (glyph, style) in zip(lines, glyphs, strict=True):
                if x == cursor:
                    style = marked(glyph, style, colours)
                line.add_cells(glyph, fold.cell - gap, style)
                line.add_cells(" ", gap, colours.text)
        return lines

    def experts(self, layer: int) -> Sequence[int]:
        """The experts of a layer from left to right."""
        return self.order.get(layer) or range(len(self.at.row(layer)[0]))

    def cell_of(self, cell: Cell) -> int | None:
        """The index, in its row, of the cell that contains an expert; None if the expert has no cell."""
        order = self.order.get(cell[0])
        place = order.index(cell[1]) if order and cell[1] in order else cell[1]
        return place // self.fold.across if place // self.fold.across < self.fold.cells else None

    def worst_of(self, y: int, x: int) -> Cell | None:
        """The worst expert in a cell: an expert with almost no load, else the expert whose load is farthest from the
        mean load."""
        found: list[tuple[float, Cell]] = []
        for layer in self.fold.rows[y]:
            low, high = self.at.row(layer)
            for expert in self.experts(layer)[x * self.fold.across : (x + 1) * self.fold.across]:
                far = 1e9 if low[expert] < DEAD else max(high[expert] - 1, 1 - low[expert])
                found.append((-far, (layer, expert)))
        return min(found)[1] if found else None

    def _extremes(self, layers: Sequence[int]) -> list[tuple[float, float]]:
        """The lowest and the highest load in each cell of a row."""
        across = self.fold.across
        lows: list[Sequence[float]] = []
        highs: list[Sequence[float]] = []
        for layer in layers:
            low, high = self.at.row(layer)
            if order := self.order.get(layer):
                low, high = [low[expert] for expert in order], [high[expert] for expert in order]
            # The last cell may hold fewer experts; its last expert is then counted repeatedly.
            fill = -len(low) % across
            for values, parts in ((low, lows), (high, highs)):
                whole = [*values, *[values[-1]] * fill] if fill else values
                parts += [whole[i::across] for i in range(across)]
        if len(lows) == 1:
            return list(zip(lows[0], highs[0], strict=True))
        if len({len(part) for part in lows}) > 1:  # layers with different numbers of experts
            lows = [[*part, *[math.inf] * (self.fold.cells - len(part))] for part in lows]
            highs = [[*part, *[-math.inf] * (self.fold.cells - len(part))] for part in highs]
        return list(zip(map(min, *lows), map(max, *highs), strict=True))

    def _glyphs(self, low: float, high: float) -> list[tuple[str, Style]]:
        """The glyphs of a cell from top to bottom. If all experts in the cell have the same load, as in a cell of one
        expert, the glyphs form a bar as high as this load, or show that the expert is dead. Otherwise they are the
        glyph of `folded`, which shows the highest and the lowest load."""
        tall = self.fold.tall
        if low == high:
            style = self.colours.deviation[load_bin(high)]
            if low < DEAD:
                return [(" ", style)] * (tall - 1) + [(DEAD_GLYPH, self.colours.level[Level.BAD])]
            return [(glyph, style) for glyph in column(high / FULL, tall)]
        return [folded(low, high, self.colours)] * tall


def folded(low: float, high: float, colours: Palette) -> tuple[str, Style]:
    """The glyph and the style of a map cell that stands for several loads. The upper half has the colour of the highest
    load, and the lower half the colour of the lowest load. On a terminal without colour, the density of the glyph shows
    the highest load. If one of the experts is dead or hot, the cell shows a special glyph instead, so that the
    cell is easy to find."""
    dead, hot = low < DEAD, high >= HOT
    if dead:
        return BOTH_GLYPH if hot else DEAD_GLYPH, colours.level[Level.BAD]
    if hot:
        return HOT_GLYPH, colours.deviation[load_bin(high)]
    if not colours.halves:
        return colours.fills[load_bin(high)], colours.text
    return CELL_GLYPH, _halves(colours.deviation[load_bin(high)], colours.deviation[load_bin(low)])


@lru_cache(maxsize=256)
def _halves(upper: Style, lower: Style) -> Style:
    return Style(color=upper.color, bgcolor=lower.color)


def marked(glyph: str, style: Style, colours: Palette) -> Style:
    """The style of a glyph under the cursor. The colours of a bar glyph are not swapped, so that its height stays
    readable; it is drawn in the strongest colour. All other glyphs are drawn in the theme's background colour on its
    strongest text colour. A terminal without colours cannot show these colours, so it shows every glyph under the
    cursor, also a bar glyph, in reverse video."""
    if glyph in BAR and not colours.cursor.reverse:
        return Style(color=colours.strong.color, bgcolor=colours.cursor.bgcolor, bold=True)
    return Style(
        color=colours.text.bgcolor, bgcolor=colours.strong.color, bold=True, reverse=colours.cursor.reverse
    )
