"""The loads of one layer's experts as vertical bars, with lines at the mean load (fair share) and at the capacity."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agents.alerts.training import DEAD
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.experts import Shown
from cockpit.tui.drawing.strips import StripLine, column
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.widgets.experts.heat import DEAD_GLYPH, load_bin, marked

AXIS = 9  # columns of the axis: `cap 1.25×`
WIDEST = 10
FEWEST_LINES = 4  # lines of a band: three lines of bars, and the numbers of the experts


@dataclass(frozen=True)
class Bands:
    """The arrangement of a layer's bars. The bars are drawn in bands, one band below the other; several experts may
    share a bar."""

    bands: int
    per_band: int  # bars
    across: int  # experts per bar
    bar: int  # columns of a bar
    lines: int  # lines of a band, including the line of numbers


def bands(count: int, width: int, height: int) -> Bands:
    """Lay out the bars of `count` experts in `width` x `height` cells."""
    room = max(1, width - AXIS)
    most = max(1, height // FEWEST_LINES)
    across = -(-count // (most * room))
    bars = -(-count // across)
    number = -(-bars // room)
    per_band = -(-bars // number)
    return Bands(number, per_band, across, max(1, min(WIDEST, room // per_band)), max(2, height // number))


def bars(
    at: Shown,
    layer: int,
    order: Sequence[int],
    cap: float | None,
    cursor: int | None,
    width: int,
    height: int,
    colours: Palette,
) -> list[StripLine]:
    """The bars of a layer, with the experts in the given order. `cap`: the load above which tokens are dropped; None if
    no tokens are dropped."""
    low, high = at.row(layer)
    how = bands(len(order), width, height)
    top = _top(max(high), cap)
    lines: list[StripLine] = []
    for first in range(0, len(order), how.per_band * how.across):
        those = order[first : first + how.per_band * how.across]
        groups = [those[i : i + how.across] for i in range(0, len(those), how.across)]
        lines += _band(groups, low, high, top, cap, cursor, how, colours)
    return lines


def _top(most: float, cap: float | None) -> float:
    """The upper end of the scale: a round number that is at least the highest load and the capacity, so that the scale
    changes rarely."""
    over = max(2.0, most, cap or 0.0)
    step = 0.5 if over <= 4 else 10 ** math.floor(math.log10(over))
    return math.ceil(over / step) * step


def _band(
    groups: Sequence[Sequence[int]],
    low: Sequence[float],
    high: Sequence[float],
    top: float,
    cap: float | None,
    cursor: int | None,
    how: Bands,
    colours: Palette,
) -> list[StripLine]:
    rows = how.lines - 1
    cap_row = None if cap is None else min(rows - 1, int(cap / top * rows))
    fair_row = min(rows - 1, int(rows / top))
    heights = [column(max(high[one] for one in group) / top, rows) for group in groups]
    lines = []
    for row in range(rows - 1, -1, -1):
        if row == cap_row:
            line = StripLine().add(f"cap {cap:.3g}× ".rjust(AXIS), colours.mark)
        elif row == fair_row:
            line = StripLine().add("1× ".rjust(AXIS), colours.dim)
        elif row == rows - 1:
            line = StripLine().add(f"{top:.3g}× ".rjust(AXIS), colours.dim)
        else:
            line = StripLine().add(" " * AXIS, colours.dim)
        for group, drawn in zip(groups, heights, strict=True):
            coldest, hottest = min(low[one] for one in group), max(high[one] for one in group)
            glyph, style = drawn[rows - 1 - row], colours.deviation[load_bin(hottest)]
            if row == 0 and coldest < DEAD:
                glyph, style = DEAD_GLYPH, colours.level[Level.BAD]
            elif glyph == " " and row in (cap_row, fair_row):
                glyph, style = ("╌", colours.mark) if row == cap_row else ("┄", colours.faint)
            # Without colours, an inverted bar would be a gap, so only the index below the bar is marked.
            if cursor in group and glyph not in "╌┄" and not colours.cursor.reverse:
                style = marked(glyph, style, colours)
            gap = int(how.bar > 2)
            line.add(glyph * (how.bar - gap), style).add(" " * gap, colours.text)
        lines.append(line)
    lines.append(_numbers(groups, cursor, how, colours))
    return lines


def _numbers(groups: Sequence[Sequence[int]], cursor: int | None, how: Bands, colours: Palette) -> StripLine:
    """The line with the indices of the experts, as many as fit. The expert under the cursor is always included."""
    line = StripLine().add(" " * AXIS, colours.dim)
    wide = max(len(f"e{max(group)}") for group in groups) + 1
    here = next((x for x, group in enumerate(groups) if cursor in group), None)
    every = -(-wide // how.bar)
    mark = f"e{cursor}"
    for x, group in enumerate(groups):
        start = AXIS + x * how.bar
        free = here is None or not here - every < x < here + every
        if x == here or (x % every == 0 and free and (len(groups) - x) * how.bar >= wide - 1):
            line.pad_to(start, colours.dim)
            line.add(mark if x == here else f"e{group[0]}", colours.cursor if x == here else colours.dim)
    return line
