"""Draws the cells and the legend of the rank grid from its layout and the readings."""

from collections.abc import Collection
from functools import lru_cache

from rich.style import Style

from cockpit.data import format
from cockpit.data.diagnosis import Level
from cockpit.data.metrics import Metric, Reading
from cockpit.tui.strips import StripLine
from cockpit.tui.theme import Palette
from cockpit.tui.widgets.ranks.arrangement import Plan, Row, Slot

SEVERITY = (Level.BAD, Level.WARN, Level.NOTE, Level.GOOD)
ALARMS = (Level.BAD.value, Level.WARN.value)
FULL = "█"
FILTERED = "░"  # a rank that the filter does not select
MISSING_BAR = format.MISSING * 64
LABEL_RIGHT = 2


class Cells:
    """Draws one frame of the grid."""

    def __init__(
        self,
        metric: Metric,
        readings: dict[int, Reading],
        levels: dict[int, Level],
        colours: Palette,
        selected: int | None,
        digits: int,
        matching: Collection[int] | None = None,
    ) -> None:
        """`matching`: the ranks that the filter selects, None without a filter; the others are dimmed."""
        self.metric, self.readings, self.levels, self.colours = metric, readings, levels, colours
        self.selected, self.digits, self.matching = selected, digits, matching
        self.top = max((r.value for r in readings.values() if r.value is not None), default=0.0)

    def rows(self, layout: Plan) -> list[StripLine]:
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
            self._cells(line, layout, row)
            lines.append(line)
        return lines

    def _cells(self, line: StripLine, layout: Plan, row: Row) -> None:
        if layout.wide:
            for slot in row.top:
                if slot:
                    self._wide(line, slot[0], layout.cell)
                else:
                    line.add(" " * layout.cell, self.colours.dim)
        elif row.bottom is None:
            for slot in row.top:
                rank = self._worst(slot)
                glyph, style = self._tile(rank)
                text = glyph * max(1, layout.cell - 1)
                line.add(text, self._cursor(slot, style)).add(
                    " " * (layout.cell - len(text)), self.colours.dim
                )
        else:
            for i, slot in enumerate(row.top):
                self._half(line, slot, row.bottom[i] if i < len(row.bottom) else ())

    def _wide(self, line: StripLine, rank: int, width: int) -> None:
        """Draw a wide cell: `r3 ▇▇▇▇  412 !`."""
        reading, level, colours = self.readings[rank], self.levels[rank], self.colours
        chosen = rank == self.selected
        tag = colours.cursor if chosen else colours.dim
        line.add(f"r{rank}".rjust(self.digits + 1), tag).add(" ", colours.dim)
        if not self._matches(rank):
            line.add(FILTERED.ljust(width - self.digits - 2), colours.faint)
            return
        bar_width = width - self.digits - 12
        shade = colours.faint if level in (Level.BAD, Level.NOTE) else self._shade(reading)
        share = reading.value / self.top if reading.value is not None and self.top else 0.0
        filled = max(
            1, round(share * bar_width)
        )  # whole cells are enough, because the number beside the bar is exact
        line.add("▇" * filled if share else MISSING_BAR[:bar_width], shade)
        line.add(" " * (bar_width - filled if share else 0), shade)
        number = colours.level[level] if level in (Level.WARN, Level.BAD) else colours.text
        line.add(format.fixed(reading.value, 6, self.metric.digits), number)
        glyph = level.value if level in (Level.WARN, Level.BAD) else " "
        line.add(f" {glyph}  ", colours.level[level])

    def _shade(self, reading: Reading) -> Style:
        if not self.metric.worse:
            share = reading.value / self.top if reading.value is not None and self.top else 0.0
            return self.colours.ramp[min(len(self.colours.ramp) - 1, int(share * len(self.colours.ramp)))]
        return self.colours.deviation[Palette.bin(reading.deviation * self.metric.worse)]

    def _matches(self, rank: int) -> bool:
        return self.matching is None or rank in self.matching

    def _worst(self, slot: Slot) -> int:
        """The worst rank of a cell; the worst of those that match the filter, if any does."""
        worse = self.metric.worse or 1
        return min(
            [rank for rank in slot if self._matches(rank)] or slot,
            key=lambda rank: (SEVERITY.index(self.levels[rank]), -self.readings[rank].deviation * worse),
        )

    def _tile(self, rank: int) -> tuple[str, Style]:
        if not self._matches(rank):
            return FILTERED, self.colours.faint
        level = self.levels[rank]
        if level is Level.GOOD:
            return FULL, self._shade(self.readings[rank])
        return level.value, self.colours.level[level]

    def _cursor(self, slot: Slot, style: Style) -> Style:
        return self.colours.cursor if self.selected in slot else style

    def _half(self, line: StripLine, top: Slot, bottom: Slot) -> None:
        above = self._tile(self._worst(top))
        below = self._tile(self._worst(bottom)) if bottom else None
        alarm = next((tile for tile in (above, below) if tile and tile[0] in ALARMS), None)
        if self.selected is not None and (self.selected in top or self.selected in bottom):
            line.add(alarm[0] if alarm else "◆", self.colours.cursor)
        elif alarm:
            line.add(*alarm)  # an alarm fills the whole cell
        elif above[0] == FULL and below and below[0] == FULL:
            line.add("▀", _halves(above[1], below[1]))
        elif above[0] == FULL:
            line.add("▀", above[1])
        elif below and below[0] == FULL:
            line.add("▄", below[1])
        else:
            line.add(*above)


@lru_cache(maxsize=4096)
def _halves(top: Style, bottom: Style) -> Style:
    return Style(color=top.color, bgcolor=bottom.color)


def legend(metric: Metric, levels: dict[int, Level], world: int, layout: Plan, colours: Palette) -> StripLine:
    line = StripLine()
    if metric.worse:
        line.add("better " if layout.label else "", colours.dim)
        for style in colours.deviation:
            line.add("▇", style)
        line.add(" worse", colours.dim)
    else:
        line.add("0 ", colours.dim)
        for style in colours.ramp:
            line.add("▇", style)
        line.add(" most", colours.dim)
    line.add("   ", colours.dim)
    not_joined = world - len(levels)
    for level in (Level.GOOD, Level.WARN, Level.BAD, Level.NOTE):
        count = sum(found is level for found in levels.values()) + (not_joined if level is Level.NOTE else 0)
        if count or level is Level.GOOD:
            line.add(f"{level.value} {count}  ", colours.level[level] if count else colours.faint)
    if layout.shared > 1:
        line.add(f"a cell is the worst of {layout.shared}", colours.dim)
    return line
