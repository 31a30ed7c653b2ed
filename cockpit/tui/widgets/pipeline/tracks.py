"""Draws lanes of pipeline actions: blocks with the name of each action, idle time as a thin line, and a ruler in ms."""

import math
from dataclasses import dataclass

from rich.style import Style

from agents.protocol import Action
from cockpit.data import format
from cockpit.data.pipeline.pipelines import Lane
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette

IDLE = "─"
ELSEWHERE = "╌"  # the rank runs another one of its stages
TICK_CELLS = 12  # at least this many cells between two labels of the ruler


@dataclass(frozen=True)
class Window:
    """The visible time window, which starts at `start_ms`, lasts `length_ms`, and fills `cells` cells."""

    start_ms: float
    length_ms: float
    cells: int

    def cell(self, ms: float) -> float:
        return (ms - self.start_ms) / self.length_ms * self.cells if self.length_ms else 0.0

    def ms(self, cell: float) -> float:
        return self.start_ms + cell / self.cells * self.length_ms if self.cells else self.start_ms

    @property
    def cell_ms(self) -> float:
        return self.length_ms / self.cells if self.cells else 0.0


def ruler(window: Window, colours: Palette) -> StripLine:
    """A time axis with labels at round times, each above its cell, such as ``0     20    40 ms``."""
    line = StripLine()
    if window.length_ms <= 0 or window.cells < TICK_CELLS:
        return line
    unit = 10 ** math.floor(math.log10(window.length_ms * TICK_CELLS / window.cells))
    step = next(
        unit * factor
        for factor in (1, 2, 5, 10, 20)
        if window.cell(window.start_ms + unit * factor) >= TICK_CELLS
    )
    digits = max(0, -math.floor(math.log10(step)))
    tick = math.ceil(window.start_ms / step - 1e-9)
    while (column := round(window.cell(tick * step))) < window.cells:
        text = f"{tick * step:.{digits}f}"
        if not line.width:
            text += " ms"
        if column >= line.width and column + len(text) + 1 <= window.cells:
            line.pad_to(column, colours.faint).add("╷", colours.faint).add(text, colours.dim)
        tick += 1
    return line


def lane_cells(
    line: StripLine,
    lane: Lane,
    window: Window,
    colours: Palette,
    cursor: Action | None,
    cursor_cell: int | None,
) -> None:
    """Draw a lane (the actions of one rank or stage) in `window.cells` terminal cells. The block of an action shows as
    much of the action's name as fits. A cell with several actions shows the lower-case letter of the kind that fills
    most of the cell. A cell is drawn as idle if the lane is idle for at least half of the cell's time."""
    cells = _Cells(window.cells)
    for action in lane.others:
        cells.thin(window.cell(action.start_ms), window.cell(action.end_ms))
    parts = {stage: number for number, stage in enumerate(lane.parts)}
    for action in lane.actions:
        first, last = window.cell(action.start_ms), window.cell(action.end_ms)
        if last <= 0 or first >= window.cells:
            continue
        part = parts[action.stage] if len(parts) > 1 else None
        style = colours.cursor if action is cursor else block_style(action, part, colours)
        if last - first >= 1.0:
            cells.block(first, last, action, part, style)
        else:
            cells.share(first, last, action, style)
    cells.draw(line, colours, cursor_cell)


class _Cells:
    """Collects the cells of a lane, then draws them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.glyphs: list[tuple[str, Style] | None] = [None] * count
        self.elsewhere = [False] * count
        self.shares: dict[int, dict[str, tuple[float, Style]]] = {}
        self.actions: dict[int, int] = {}  # short actions by cell

    def thin(self, first: float, last: float) -> None:
        for cell in range(max(0, round(first)), min(self.count, round(last))):
            self.elsewhere[cell] = True

    def block(self, first: float, last: float, action: Action, part: int | None, style: Style) -> None:
        begin, end = max(0, round(first)), min(self.count, max(round(last), round(first) + 1))
        text = block_name(action, part, end - begin) if begin < end else ""
        for place, glyph in zip(range(begin, end), text, strict=False):
            self.glyphs[place] = (glyph, style)

    def share(self, first: float, last: float, action: Action, style: Style) -> None:
        for cell in range(max(0, int(first)), min(self.count, math.ceil(last))):
            covered = min(last, cell + 1) - max(first, cell)
            kinds = self.shares.setdefault(cell, {})
            kinds[action.kind] = (kinds.get(action.kind, (0.0, style))[0] + covered, style)
            self.actions[cell] = self.actions.get(cell, 0) + 1

    def draw(self, line: StripLine, colours: Palette, cursor_cell: int | None) -> None:
        for cell in range(self.count):
            glyph = self.glyphs[cell]
            kinds = self.shares.get(cell)
            if glyph is None and kinds and sum(share for share, _ in kinds.values()) > 0.5:
                kind, (_, style) = max(kinds.items(), key=lambda item: item[1][0])
                glyph = (kind.lower(), style)
            if glyph is None:
                glyph = (ELSEWHERE if self.elsewhere[cell] else IDLE, colours.faint)
            line.add(glyph[0], colours.cursor if cell == cursor_cell else glyph[1])


def stops(lane: Lane, cell_ms: float) -> list[float]:
    """The positions at which the cursor stops: the start of each action, and the start of each gap of at least one
    cell."""
    stops, end = [0.0], 0.0
    for action in lane.actions:
        if action.start_ms - end >= cell_ms:
            stops.append(end)
        stops.append(action.start_ms)
        end = max(end, action.end_ms)
    return sorted({*stops, *([end] if lane.window_ms - end >= cell_ms else [])})


def block_name(action: Action, part: int | None, width: int) -> str:
    """The name of a block in `width` cells, such as `` F3b ``, ``F3`` or ``3``. A number that does not fit is
    omitted, never truncated."""
    name = f"{action.kind}{action.micro_batch}"
    if part is not None and width > len(name):
        name += chr(ord("a") + part % 26)
    if width < len(name):
        number = str(action.micro_batch)
        name = number if len(number) <= width else action.kind
    return f"{name:<{width}}" if width < 5 else f" {name:<{width - 1}}"


def block_style(action: Action, part: int | None, colours: Palette) -> Style:
    """The style of a block. The shade alternates with the micro-batch or, if a rank has several stages, with the
    stage."""
    pair = {"F": colours.forward, "B": colours.backward, "W": colours.weight}[action.kind]
    return pair[(action.micro_batch if part is None else part) % 2]


def legend(lane: Lane | None, folded: bool, colours: Palette) -> StripLine:
    """The legend of the timeline: the colour of each kind of action. `folded`: whether some terminal cells hold several
    actions."""
    line = StripLine()
    for pair, text in (
        (colours.forward, " F forward "),
        (colours.backward, " B backward "),
        (colours.weight, " W weights "),
    ):
        line.add(text, pair[0]).add(" ", colours.dim)
    line.add(f"{IDLE} idle ", colours.dim)
    if lane is not None and lane.stage is None and len(lane.parts) > 1:
        named = ", ".join(f"{chr(ord('a') + i % 26)}" for i in range(min(3, len(lane.parts))))
        line.add(f" {named} stages of a rank ", colours.dim)
    if lane is not None and lane.others:
        line.add(f" {ELSEWHERE} its other stage ", colours.dim)
    if folded:
        line.add(" f b w: several in a cell, + zooms", colours.dim)
    return line


def missing(line: StripLine, width: int, colours: Palette) -> None:
    line.add(format.MISSING * width, colours.faint)
