"""Draws the cells and the legend of the rank grid, from its layout and from the value and deviation of each rank."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection
from functools import cached_property, lru_cache
from itertools import groupby, zip_longest

from rich.style import Style

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.metrics import Against, Metric, Reading, Readings, against_text
from cockpit.data.ranks.rank_levels import SEVERITY
from cockpit.data.scale import label, nice_range
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import DEVIATION_EDGES, RAMP, SHADES, SOLID, Palette
from cockpit.tui.widgets.ranks.arrangement import Plan, Row, Slot

ALARMS = (Level.BAD.value, Level.WARN.value)
FILLS = frozenset(SOLID + SHADES + RAMP)
FILTERED = "╌"  # a rank that the filter does not select
MISSING_BAR = format.MISSING * 64
LABEL_RIGHT = 2
MOST = 10.0  # larger deviations count as equally bad
# A cell has a code: a bin of the palette, or one of these. The tables of glyphs and styles are by code.
CODES = {Level.WARN: 32, Level.BAD: 33, Level.NOTE: 34}
DIMMED, EMPTY, HERE = 35, 36, 37
CURSOR = "◆"
BITS = 8  # the codes of the two halves of a cell in one number

Tile = tuple[str, Style]


def value_range(readings: Readings) -> tuple[float, float]:
    """The range of the finite values, with both ends rounded so that the range changes rarely."""
    known = [value for value in readings.values_ if abs(value) < float("inf")]
    return nice_range(min(known), max(known)) if known else (0.0, 1.0)


def bins(metric: Metric, readings: Readings, against: Against, ramp: int) -> list[int]:
    """For each rank, the index of its colour in the palette's scale. With `Against.NOTHING`, the index depends on the
    rank's value, otherwise on the rank's deviation."""
    if against is Against.NOTHING:
        low, high = value_range(readings)
        width = (high - low) / ramp
        return [
            min(ramp - 1, max(0, int((value - low) / width))) if abs(value) < float("inf") else 0
            for value in readings.values_
        ]
    if metric.worse < 0:
        return [bisect_right(DEVIATION_EDGES, -deviation) for deviation in readings.deviations]
    return [bisect_right(DEVIATION_EDGES, deviation) for deviation in readings.deviations]


class Cells:
    """Draws the cells of the rank grid, with one metric's value and deviation for each rank (`readings`). From one
    drawing to the next, only `selected` may change; if anything else changes, create a new object."""

    def __init__(
        self,
        metric: Metric,
        readings: Readings,
        levels: dict[int, Level],
        colours: Palette,
        selected: int | None,
        digits: int,
        matching: Collection[int] | None = None,
        against: Against = Against.PEERS,
    ) -> None:
        """`matching`: the ranks that match the filter; None without a filter. All other ranks are dimmed."""
        self.metric, self.readings, self.levels, self.colours = metric, readings, levels, colours
        self.selected, self.digits, self.matching = selected, digits, matching
        shades = colours.ramp if against is Against.NOTHING else colours.deviation
        self._shades = shades
        self.bins = dict(zip(readings.ranks, bins(metric, readings, against, len(colours.ramp)), strict=True))
        self._codes = self.bins | {
            rank: CODES[level] for rank, level in levels.items() if level is not Level.GOOD
        }
        if matching is not None:
            self._codes |= dict.fromkeys(self._codes.keys() - matching, DIMMED)
        fills = colours.ramp_fills if against is Against.NOTHING else colours.fills
        self._tiles: dict[int, Tile] = dict(enumerate(zip(fills, shades, strict=True)))
        self._tiles |= {code: (level.value, colours.level[level]) for level, code in CODES.items()}
        self._tiles[DIMMED] = (FILTERED, colours.faint)
        self._tiles[EMPTY] = (" ", colours.dim)
        self._halves: dict[int, Tile] = {}
        self._scores: dict[int, float] = {}
        self._layout: Plan | None = None  # results of `_row_codes`
        self._row_codes: dict[
            int, list[int]
        ] = {}  # codes of the slots of a row, by the identity of their list

    def rows(self, layout: Plan) -> list[StripLine]:
        if layout is not self._layout:
            self._layout, self._row_codes = layout, {}
        lines = []
        if layout.columns:
            head = StripLine().pad_to(layout.label, self.colours.faint)
            for name in layout.columns:
                head.add(f"{'':{self.digits + 2}}{name}".ljust(layout.cell)[: layout.cell], self.colours.dim)
            lines.append(head)
        for row in layout.rows:
            line = StripLine().add(row.label, self.colours.text)
            if row.sub:
                line.pad_to(layout.label - LABEL_RIGHT - len(row.sub), self.colours.dim).add(
                    row.sub, self.colours.dim
                )
            line.pad_to(layout.label, self.colours.dim)
            if layout.wide:
                self._wide_cells(line, layout, row)
            elif row.bottom is None:
                self._cells(line, layout, row)
            else:
                self._half_cells(line, row.top, row.bottom)
            lines.append(line)
        return lines

    @cached_property
    def top(self) -> float:
        """The highest value, at which the bar of a wide cell is full."""
        return max((value for value in self.readings.values_ if value == value), default=0.0)

    def _wide_cells(self, line: StripLine, layout: Plan, row: Row) -> None:
        for slot in row.top:
            if slot:
                self._wide(line, slot[0], layout.cell)
            else:
                line.add(" " * layout.cell, self.colours.dim)

    def _cells(self, line: StripLine, layout: Plan, row: Row) -> None:
        gap = " " * (layout.cell > 1)
        codes = self._codes_of(row.top)
        for slot, code in zip(row.top, codes, strict=True) if gap else ():
            glyph, style = self._tiles[code]
            if self.selected in slot:
                line.add(_chosen(glyph, layout.cell - 1), self.colours.cursor)
            else:
                line.add(glyph * (layout.cell - 1), style)
            line.add(gap, self.colours.dim)
        if not gap:
            here = next((i for i, slot in enumerate(row.top) if self.selected in slot), -1)
            for code, run in groupby(_marked(codes, here)):
                if code == HERE:
                    line.add(_chosen(self._tiles[codes[here]][0], 1), self.colours.cursor)
                    continue
                glyph, style = self._tiles[code]
                line.add(glyph * len(list(run)), style)

    def _half_cells(self, line: StripLine, top: list[Slot], bottom: list[Slot]) -> None:
        above, below = self._codes_of(top), self._codes_of(bottom)
        pairs = [over << BITS | under for over, under in zip_longest(above, below, fillvalue=EMPTY)]
        here = next(
            (
                i
                for i, (over, under) in enumerate(zip_longest(top, bottom, fillvalue=()))
                if self.selected in over or self.selected in under
            ),
            -1,
        )
        for pair, run in groupby(_marked(pairs, here)):
            if pair == HERE:
                glyph, _ = self._half(pairs[here])
                line.add(_chosen(glyph, 1), self.colours.cursor)
            else:
                glyph, style = self._half(pair)
                line.add(glyph * len(list(run)), style)

    def _half(self, pair: int) -> Tile:
        """The glyph and style of a cell with two halves."""
        known = self._halves.get(pair)
        if known is None:
            codes = pair >> BITS, pair & (1 << BITS) - 1
            if self.colours.halves:
                known = self._joined(*(self._tiles[code] for code in codes))
            else:  # two glyphs do not fit into a cell, so it shows the worse half
                known = self._tiles[max(codes, key=_gravity)]
            self._halves[pair] = known
        return known

    @staticmethod
    def _joined(above: Tile, below: Tile) -> Tile:
        for alarm in ALARMS:
            for tile in (above, below):
                if tile[0] == alarm:
                    return tile  # an alarm fills the whole cell
        full, filled = above[0] in FILLS, below[0] in FILLS
        if full and filled:
            return "▀", _halves(above[1], below[1])
        if full:
            return "▀", above[1]
        return ("▄", below[1]) if filled else above

    def _wide(self, line: StripLine, rank: int, width: int) -> None:
        """Draw a wide cell, such as `r3 ▇▇▇▇  412 !`."""
        reading, level, colours = self.readings[rank], self.levels[rank], self.colours
        chosen = rank == self.selected
        tag = colours.cursor if chosen else colours.dim
        line.add(f"r{rank}".rjust(self.digits + 1), tag).add(" ", colours.dim)
        if self._codes[rank] == DIMMED:
            line.add(FILTERED.ljust(width - self.digits - 2), colours.faint)
            return
        bar_width = width - self.digits - 12
        shade = colours.faint if level in (Level.BAD, Level.NOTE) else self._shades[self.bins[rank]]
        share = _share(reading, self.top)
        # whole cells are enough, because the number beside the bar is exact
        filled = max(1, round(share * bar_width))
        line.add("▇" * filled if share else MISSING_BAR[:bar_width], shade)
        line.add(" " * (bar_width - filled if share else 0), shade)
        number = colours.level[level] if level in (Level.WARN, Level.BAD) else colours.text
        line.add(format.fixed(reading.value, 6, self.metric.digits), number)
        glyph = level.value if level in (Level.WARN, Level.BAD) else " "
        line.add(f" {glyph}  ", colours.level[level])

    def _codes_of(self, slots: list[Slot]) -> list[int]:
        """For each cell in a row, the code (the index of glyph and colour) of the worst rank in the cell. If some ranks
        in the cell match the filter, the other ranks are ignored."""
        known = self._row_codes.get(id(slots))
        if known is None:
            codes, score = (
                self._codes,
                self._score.__getitem__ if any(len(one) > 1 for one in slots) else None,
            )
            known = self._row_codes[id(slots)] = [
                codes[slot[0] if len(slot) == 1 else max(slot, key=score)] if slot else EMPTY
                for slot in slots
            ]
        return known

    @property
    def _score(self) -> dict[int, float]:
        """How bad the state of each rank is: higher is worse. Ranks are compared first by their state (lost is worst,
        then slow or stalled, without data, good), then by deviation from the baseline, which is limited to 1000 %.
        """
        if not self._scores:
            towards = self.metric.worse or 1
            scores = [by * towards if by * towards < MOST else MOST for by in self.readings.deviations]
            self._scores = dict(zip(self.readings.ranks, scores, strict=True))
            for rank, level in self.levels.items():
                if level is not Level.GOOD:
                    self._scores[rank] += 100 * SEVERITY[level]
            if self.matching is not None:
                self._scores |= dict.fromkeys(self._scores.keys() - self.matching, -1000.0)
        return self._scores


def _share(reading: Reading, top: float) -> float:
    return reading.value / top if reading.value is not None and top else 0.0


def _chosen(glyph: str, width: int) -> str:
    """The text of the cell under the cursor. A cell with a warning or error glyph keeps this glyph."""
    return glyph * width if glyph in ALARMS else CURSOR.ljust(width)


def _gravity(code: int) -> int:
    """How severe the state or the deviation that a cell shows is, from the cell's code (the index of its glyph and
    colour): higher is worse. Cells without a value are the least severe."""
    return code if code <= CODES[Level.BAD] else -code


def _marked(codes: list[int], here: int) -> list[int]:
    """`codes`, with the code of the cell under the cursor replaced by `HERE`. `here`: the index of this cell; -1 if the
    cursor is in another line."""
    return codes if here < 0 else [*codes[:here], HERE, *codes[here + 1 :]]


@lru_cache(maxsize=4096)
def _halves(top: Style, bottom: Style) -> Style:
    return Style(color=top.color, bgcolor=bottom.color)


def scale_bar(
    line: StripLine,
    metric: Metric,
    readings: Readings,
    against: Against,
    colours: Palette,
    words: bool = True,
) -> StripLine:
    """The colour scale of the legend, with a word or a number at each end."""
    if against is Against.NOTHING:
        low, high = value_range(readings)
        ends, shades = (f"{label(low)} ", f" {label(high)} {metric.unit}".rstrip()), colours.ramp
        fills = colours.ramp_fills
    else:
        ends = ("better ", " worse") if metric.worse else ("less ", " more")
        shades, fills = colours.deviation, colours.fills
    line.add(ends[0] if words else "", colours.dim)
    for glyph, style in zip(fills, shades, strict=True):
        line.add("▇" if colours.fills == SOLID else glyph, style)
    return line.add(ends[1], colours.dim)


def legend(
    metric: Metric,
    readings: Readings,
    levels: dict[int, Level],
    store: Store,
    layout: Plan,
    against: Against,
    width: int,
    colours: Palette,
) -> StripLine:
    """The legend: the colour scale and its meaning, how many ranks are good, slow or stalled, lost, or without data,
    and how many ranks share a cell."""
    line = scale_bar(StripLine(), metric, readings, against, colours, bool(layout.label))
    line.add("   ", colours.dim)
    others = Counter(level for level in levels.values() if level is not Level.GOOD)
    counts = others + Counter({Level.GOOD: len(levels) - others.total()})
    counts[Level.NOTE] += store.world - len(levels)  # ranks that have not joined
    for level in (Level.GOOD, Level.WARN, Level.BAD, Level.NOTE):
        count = counts[level]
        if count or level is Level.GOOD:
            line.add(f"{level.value} {count}  ", colours.level[level] if count else colours.faint)
    for text in _shared_texts(layout) or _halved_texts(layout, colours):
        if line.width + len(text) <= width:
            line.add(f"{text} ", colours.dim)
            break
    dot = "· " if layout.shared > 1 else ""
    compared = dot + against_text(against, store)
    if line.width + len(compared) <= width:
        line.add(compared, colours.dim)
    return line


def _halved_texts(layout: Plan, colours: Palette) -> list[str]:
    """The legend's note that a line shows the worse of two rows. An empty list if each line has only one row, or if it
    shows both rows because the terminal can colour the upper and the lower half of a cell separately.
    """
    two = not colours.halves and any(row.bottom is not None for row in layout.rows)
    return ["a line is the worse of two rows"] if two else []


def _shared_texts(layout: Plan) -> list[str]:
    """Phrases for the legend if a cell shows several ranks, longest first."""
    if layout.nodes:
        nodes = "a node" if layout.nodes == 1 else f"{layout.nodes} nodes"
        short = f"worst of {nodes}"
        return [f"a cell is the {short}, {layout.shared} ranks", f"a cell is the {short}", short]
    short = f"worst of {layout.shared}"
    return [f"a cell is the {short}", short] if layout.shared > 1 else []
