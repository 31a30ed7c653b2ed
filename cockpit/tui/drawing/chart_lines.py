"""One chart as lines of terminal cells: the overlaid curves, the y axis, marks, the cursor, and the ruler below."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.style import Style

from cockpit.data import format
from cockpit.data.curves.segments import Segment
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.scale import LABEL, Scale
from cockpit.tui.drawing.chart import SOLID, Dash, Drawing, Place, XAxis, draw
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette

AXIS = LABEL + 2  # width of the y axis, in columns

ABOVE, BELOW, BROKEN = "▲", "▼", Level.BAD.value
CURSOR = "│"
_GLYPHS = {bits: 0x2800 + bits for bits in range(1, 256)} | {0: ord(" ")}


@dataclass(frozen=True)
class Line:
    """A line of a chart; a line with gaps consists of several polylines."""

    polylines: Sequence[Sequence[Place]]
    style: Style
    dash: Dash = SOLID


@dataclass(frozen=True)
class Overlay:
    """The parts of a chart other than its lines: marks by column, horizontal lines at given y values, the column of the
    cursor, and the columns with values that are not finite.
    """

    verticals: Mapping[int, tuple[str, Style]] = field(default_factory=dict)
    levels: Sequence[tuple[float, str, Style]] = ()  # if several are in one row, the first is drawn
    cursor: int | None = None
    broken: frozenset[int] = frozenset()


Layer = tuple[Drawing, Style]


def draw_lines(lines: Sequence[Line], axis: XAxis, rows: int, scale: Scale) -> list[Layer]:
    """Draw `lines`, the last one on top. The result begins with the topmost line: where several lines share a cell, the
    cell shows only the dots of the first one in the result."""
    layers = [(draw(line.polylines, axis, rows, scale, line.dash), line.style) for line in lines]
    return layers[::-1]


def chart_rows(
    drawings: Sequence[Layer], axis: XAxis, rows: int, scale: Scale, over: Overlay, colours: Palette
) -> list[StripLine]:
    """A chart of `drawings` as `rows` lines, each `AXIS` + `axis.columns` cells wide."""
    above = frozenset().union(*(drawing.above for drawing, _ in drawings))
    below = frozenset().union(*(drawing.below for drawing, _ in drawings))
    places = _label_rows(rows)
    labels = dict(
        zip(places, scale.labels([1 - row / (rows - 1) if rows > 1 else 0.0 for row in places]), strict=True)
    )
    found = []
    for row in range(rows):
        label, joint = labels.get(row, ""), "┤" if row in labels else "│"
        found.append(StripLine().add(f"{label:>{LABEL}} {joint}", colours.dim))
        edge: dict[int, tuple[str, Style]] = {}
        warn = colours.level[Level.WARN]
        if row == 0:
            edge.update((column, (ABOVE, warn)) for column in above)
        if row == rows - 1:
            edge.update((column, (BELOW, warn)) for column in below)
            edge.update((column, (BROKEN, colours.level[Level.BAD])) for column in over.broken)
        level = next(
            ((glyph, style) for value, glyph, style in over.levels if _row(scale, value, rows) == row), None
        )
        _add_cells(found[-1], drawings, row, axis.columns, edge, over, level or (" ", colours.text), colours)
    return found


def _row(scale: Scale, value: float, rows: int) -> int | None:
    """The row in which a y value is drawn; None if the value is off the scale."""
    place = scale.place(value)
    return rows - 1 - round(place * (rows - 1)) if 0 <= place <= 1 else None


def _label_rows(rows: int) -> list[int]:
    """The rows of the axis that have a label: the top, the bottom and, if there is room, the middle."""
    return [0] if rows == 1 else [0, rows // 2, rows - 1] if rows > 4 else [0, rows - 1]


def _add_cells(
    line: StripLine,
    drawings: Sequence[tuple[Drawing, Style]],
    row: int,
    columns: int,
    edge: Mapping[int, tuple[str, Style]],
    over: Overlay,
    level: tuple[str, Style],
    colours: Palette,
) -> None:
    """Add the cells of a row; adjacent cells of equal style are merged. `level`: the glyph and style of cells that
    would otherwise be blank, such as those of a horizontal line at a given y value."""
    layers = [(drawing.cells[row], style) for drawing, style in drawings if any(drawing.cells[row])]
    plain = len(layers) < 2 and level[0] == " "
    special = {*edge, *over.verticals, *(() if over.cursor is None else (over.cursor,))} if plain else ()
    whole = layers[0][0].decode("latin-1").translate(_GLYPHS) if layers and plain else " " * columns
    base = layers[0][1] if layers and plain else colours.text
    begin = 0
    for column in sorted(special) if plain else range(columns):
        if not 0 <= column < columns:
            continue
        if plain:
            line.add(whole[begin:column], base)
            begin = column + 1
        glyph, style = " ", colours.text
        for cells, own in layers:
            if cells[column]:
                glyph, style = chr(0x2800 + cells[column]), own
                break
        if column in edge:
            glyph, style = edge[column]
        elif glyph == " " and column in over.verticals:
            glyph, style = over.verticals[column]
        elif glyph == " ":
            glyph, style = level
        if column == over.cursor:
            glyph, style = glyph if 0x2800 < ord(glyph) < 0x2900 or column in edge else CURSOR, colours.cursor
        line.add(glyph, style)
    if plain:
        line.add(whole[begin:], base)


def ruler(
    axis: XAxis, left: str, right: str, coarse: Sequence[Segment], steps: XAxis, colours: Palette
) -> StripLine:
    """The x axis with labels at its ends, and `╌` along each part for which only `coarse` segments (buckets of several
    steps) are known. `steps`: the axis that converts the x values of `coarse`, which are training steps, to columns.
    """
    bucketed = [False] * axis.columns
    for one in coarse:
        begin, end = (max(0, min(axis.columns - 1, steps.column(one.points[place][0]))) for place in (0, -1))
        bucketed[begin : end + 1] = [True] * (end + 1 - begin)
    widest = max((one.width for one in coarse), default=0)
    note = f"╌ lowest and highest of {format.grouped(widest)} steps" if widest else ""
    under = "".join("╌" if here else " " for here in bucketed)[len(left) : axis.columns - len(right)]
    if note and len(note) + 4 <= len(under):
        under = f"{under[:2]} {note} {under[len(note) + 4 :]}"
    line = StripLine().add("└".rjust(AXIS), colours.dim).add(left, colours.dim).add(under, colours.faint)
    return line.pad_to(AXIS + axis.columns - len(right), colours.faint).add(right, colours.dim)
