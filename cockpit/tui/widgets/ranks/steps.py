"""Panel with the history of every rank: rows are ranks, columns are steps, and the colour is the deviation.

A slow rank appears as a horizontal stripe, skew that moves from rank to rank as a diagonal, and a single slow step as a
vertical stripe.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import groupby
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding

from cockpit.data import format
from cockpit.data.metrics import Against, Metric, against_text, peers
from cockpit.data.ranks.rank_steps import Row, RowHistory, fold
from cockpit.data.scale import label, nice_range
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import DEVIATION_EDGES, RAMP, SHADES, Palette
from cockpit.tui.keys.screen_bindings import RANK_STEPS, RANK_STEPS_KEYS
from cockpit.tui.session import Selection
from cockpit.tui.widgets.ranks import view
from cockpit.tui.widgets.ranks.base import RankPanel

UNKNOWN = -1  # bin of a cell without a value
FOOT = 2  # lines below the rows: the steps, and the legend
TALLEST = 2  # maximum number of lines of a row
COMPLETE = 0.9  # share of the ranks that makes a step complete


class Rows(Enum):
    """Which ranks have a row in the map; each value is the text in the panel's title."""

    ALL = "all ranks"
    STAGE = "its stage"
    NODE = "its node"


class RankSteps(RankPanel):
    """A map with ranks as rows and kept steps as columns. Each cell shows the deviation of a rank, or the worst
    deviation of several ranks."""

    TOPICS = frozenset({Topic.GRID, Topic.RANKS})
    TITLE = "Rank × step"
    BINDINGS: ClassVar[list[Binding]] = RANK_STEPS_KEYS  # type: ignore[assignment]
    ACTIONS = RANK_STEPS
    EVERY = 2
    HELP = (
        "Each row is a rank and each column a step, the newest on the right. A rank that is always slow is a "
        "horizontal stripe; skew that moves from rank to rank is a diagonal; one slow step is a vertical stripe. If "
        "several ranks share a row or several steps a column, the cell shows the worst of them, and the legend says "
        "how many. ← and → choose a step, which all screens then show; at the newest step, the screens follow the run "
        "again. `o` shows only the ranks of the selected rank's stage or node. `f` folds all kept steps into the "
        "width. `·` means that there is no record of the step."
    )

    def __init__(self, selection: Selection) -> None:
        super().__init__("rank-steps", selection)
        self._which = Rows.ALL
        self._folded = False
        self._history = RowHistory()
        self._rows: tuple[Row, ...] = ()
        self._columns: list[list[int]] = []  # steps of each column
        self._newest = True  # whether the last column is the newest step
        self._label = 0
        self._tall = 1  # lines per row

    def choice(self) -> object:
        # A new object causes another draw at the next tick; that draw computes more of the older steps.
        return super().choice(), self._which, self._folded, None if self._history.complete else object()

    # ------------------------------------------------------------------------------------------ titles

    def title(self, store: Store) -> str:
        metric = view.metric_of(store, self.selection)
        which = "" if self._which is Rows.ALL else f" · {self._which.value}"
        return f"Rank × step · {metric.title}{which}{view.step_text(store, self.selection, metric)}"

    def subtitle(self, store: Store) -> str:
        kept = store.rank_history.steps(view.metric_of(store, self.selection).key)
        if not kept:
            return ""
        return f"{format.counted(len(kept), 'step')} kept, since {format.grouped(kept[0])}"

    # ----------------------------------------------------------------------------------------- drawing

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        metric, against = view.metric_of(store, self.selection), self.selection.against
        steps = store.rank_history.steps(metric.key)
        foot = FOOT if height > FOOT + 1 else 1
        ranks, band = self._ranks(store)
        if self.selection.filter:
            ranks, band = view.filtered(store, self.selection, ranks), 1
            if not ranks:
                self._rows, self._columns = (), []
                return [StripLine().add(f"{format.MISSING} no rank here matches the filter", colours.faint)]
        self._rows = fold(ranks, max(1, height - foot), band)
        if not steps or not self._rows:
            self._columns = []
            return [StripLine().add(f"{format.MISSING} no record of {metric.title} yet", colours.faint)]
        self._tall = max(1, min(TALLEST, (height - foot) // len(self._rows)))
        bands, _ = view.bands_of(store, view.group_of(store, self.selection))
        labels = _labels(self._rows, {tuple(one.ranks): one.label for one in bands if len(one.ranks) > 1})
        self._label = max(map(len, labels)) + 1
        self._columns = self._columned(store, metric, steps, max(1, width - self._label))
        wanted = [step for column in self._columns for step in column]
        by_step = self._history.values(store, metric, against, self._rows, wanted)
        table = [
            _column([by_step[step] for step in column if step in by_step], metric.worse < 0)
            for column in self._columns
        ]
        bins, glyphs, styles = self._bins(metric, against, table, colours)
        lines = []
        at = self._cursor_column()
        for number, (row, text) in enumerate(zip(self._rows, labels, strict=True)):
            here = self.selection.rank in row
            codes = [column[number] if column else UNKNOWN for column in bins]
            for part in range(self._tall):
                name = text if not part else ""
                line = StripLine().add(name, colours.cursor if here else colours.dim)
                _cells(line.pad_to(self._label, colours.dim), codes, at, glyphs, styles, colours)
                lines.append(line)
        lines.append(self._ruler(width, at, colours))
        if foot > 1:
            lines.append(self._legend(metric, store, table, width, colours))
        return lines

    def _ranks(self, store: Store) -> tuple[Sequence[int], int]:
        """The ranks in the order of the rows, and the number of ranks in each group (1 if the groups differ in
        size)."""
        chosen = self.selection.rank
        if chosen in store.state.hellos and self._which is Rows.STAGE:
            keys = peers(store)
            found = [rank for rank in keys if keys[rank] == keys[chosen]]
            return sorted(found), len(found)
        if chosen in store.state.hellos and self._which is Rows.NODE:
            host = store.state.hellos[chosen].host
            found = [rank for rank, hello in store.state.hellos.items() if hello.host == host]
            return sorted(found), len(found)
        bands, _ = view.bands_of(store, view.group_of(store, self.selection))
        lists = [band.ranks for band in bands]
        sizes = {len(ranks) for ranks in lists}
        return [rank for ranks in lists for rank in ranks], sizes.pop() if len(sizes) == 1 else 1

    def _columned(self, store: Store, metric: Metric, steps: list[int], room: int) -> list[list[int]]:
        """For each visible column, the steps that it shows; at most `room` columns."""
        columns = _completed(store, metric, steps)
        if self._folded and len(columns) > room:
            gap = -(-(steps[-1] - steps[0] + 1) // room)
            # Aligned to multiples, so that columns keep their steps while the run continues.
            columns = [list(group) for _, group in groupby(steps, lambda step: step // gap)]
        end = len(columns)
        if self.selection.step is not None:
            at = bisect_left([column[-1] for column in columns], self.selection.step)
            if at < len(columns) - room:
                end = min(len(columns), at + room // 2 + 1)
        self._newest = max(end, room) >= len(columns)
        return columns[max(0, end - room) : max(end, room)]

    def _cursor_column(self) -> int:
        """The column of the selected step; -1 if the screen follows the newest step, or if the selected step is not
        kept."""
        step = self.selection.step
        return next((x for x, column in enumerate(self._columns) if step in column), -1)

    def _bins(
        self, metric: Metric, against: Against, table: list[list[float]], colours: Palette
    ) -> tuple[list[list[int]], str, tuple[Style, ...]]:
        """For each column, the index of each cell's colour in the scale; then the glyphs and the styles of the scale by
        index."""
        if against is not Against.NOTHING:
            towards = metric.worse or 1
            bins = [
                [UNKNOWN if v != v else bisect_right(DEVIATION_EDGES, v * towards) for v in column]
                for column in table
            ]
            return bins, SHADES, colours.deviation
        low, high = _range(table)
        scale = len(colours.ramp) / (high - low)
        top = len(colours.ramp) - 1
        bins = [[UNKNOWN if v != v else min(top, int((v - low) * scale)) for v in column] for column in table]
        return bins, RAMP, colours.ramp

    def _ruler(self, width: int, at: int, colours: Palette) -> StripLine:
        first, last = self._columns[0][0], self._columns[-1][-1]
        line = StripLine().add("└".rjust(self._label), colours.dim).add(format.grouped(first), colours.dim)
        right = format.grouped(last)
        end = self._label + len(self._columns)
        if at >= 0 and self.selection.step is not None:
            mark = f"▲ {format.grouped(self.selection.step)}"
            start = min(self._label + at, max(end, line.width + 1) - len(mark))
            if start > line.width:
                line.pad_to(self._label + at if start == self._label + at else start, colours.faint)
                line.add(mark, colours.mark)
        if line.width + 1 + len(right) <= end:
            line.pad_to(end - len(right), colours.faint).add(right, colours.dim)
        return line

    def _legend(
        self, metric: Metric, store: Store, table: list[list[float]], width: int, colours: Palette
    ) -> StripLine:
        line, against = StripLine(), self.selection.against
        if against is Against.NOTHING:
            low, high = _range(table)
            line.add(f"{label(low)} ", colours.dim)
            for glyph, style in zip(RAMP, colours.ramp, strict=True):
                line.add(glyph, style)
            line.add(f" {label(high)} {metric.unit}".rstrip(), colours.dim)
        else:
            below, above = ("better ", " worse") if metric.worse else ("less ", " more")
            line.add(below, colours.dim)
            for glyph, style in zip(SHADES, colours.deviation, strict=True):
                line.add(glyph, style)
            line.add(above, colours.dim)
        most, steps = max(map(len, self._rows)), max(map(len, self._columns))
        shared = [f"{most} ranks"] * (most > 1) + [f"{steps} steps"] * (steps > 1)
        if shared:
            line.add(f"   a cell is the worst of {' × '.join(shared)}", colours.text)
        if not self._history.complete:
            line.add("   older steps follow", colours.dim)
        compared = f"   {against_text(against, store)}"
        if line.width + len(compared) <= width:
            line.add(compared, colours.dim)
        return line

    # ------------------------------------------------------------------------------------------ actions

    def action_step(self, by: int) -> None:
        """Move the cursor `by` columns to the right. A move to the newest column makes the screen follow the
        run."""
        if not self._columns:
            return
        at = self._cursor_column()
        at = (len(self._columns) - 1 if at < 0 else at) + by
        if at >= len(self._columns) - 1 and self._newest:
            self.selection.step = None
        elif 0 <= at < len(self._columns):
            self.selection.step = self._columns[at][-1]
        else:
            self._beyond(by)
        self.changed()

    def _beyond(self, by: int) -> None:
        """Select the nearest kept step to the left of the first visible column (`by` < 0) or to the right of
        the last."""
        with self._store.lock:
            metric = view.metric_of(self._store, self.selection)
            steps = self._store.rank_history.steps(metric.key)
        first, last = self._columns[0][0], self._columns[-1][-1]
        if by < 0 and steps and steps[0] < first:
            self.selection.step = max(step for step in steps if step < first)
        elif by > 0 and steps and steps[-1] > last:
            self.selection.step = min(step for step in steps if step > last)

    def action_row(self, by: int) -> None:
        """Select the worst rank in the row that is `by` rows below the selected one."""
        at = next((y for y, row in enumerate(self._rows) if self.selection.rank in row), None)
        if not self._rows:
            return
        row = self._rows[0 if at is None else min(len(self._rows) - 1, max(0, at + by))]
        with self._store.lock:
            metric = view.metric_of(self._store, self.selection)
            readings = view.readings_of(self._store, self.selection, metric)
            towards = metric.worse or 1
            self.selection.rank = max(row, key=lambda rank: readings[rank].deviation * towards)
        self.changed()

    def action_rows(self) -> None:
        which = list(Rows)
        self._which = which[(which.index(self._which) + 1) % len(which)]
        self.changed()

    def action_fold(self) -> None:
        self._folded = not self._folded
        self.changed()

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        row = at.y // self._tall if at else len(self._rows)
        if at is None or row >= len(self._rows):
            return
        if self.selection.rank not in self._rows[row]:
            self.selection.rank = self._rows[row][0]
        column = at.x - self._label
        if 0 <= column < len(self._columns):
            self.selection.step = self._columns[column][-1]
        self.changed()


def _completed(store: Store, metric: Metric, steps: list[int]) -> list[list[int]]:
    """For each column, the steps that it shows. Steps for which only some ranks have a value share a column with
    neighbouring steps."""
    history = store.rank_history
    enough = COMPLETE * len(store.state.hellos)
    columns: list[list[int]] = []
    waiting: list[int] = []
    known = 0
    for step in steps:
        waiting.append(step)
        known += history.reported(step, vital=metric.vital is not None)
        if known >= enough:
            columns.append(waiting)
            waiting, known = [], 0
    return columns + [waiting] * bool(waiting)


def _labels(rows: Sequence[Row], bands: Mapping[Row, str]) -> list[str]:
    """The labels of the rows, such as ``pp4`` for all ranks with the coordinate 4 on the axis pp, ``r5`` for one rank,
    ``r8-15`` for consecutive ranks, and ``r8 +3`` for rank 8 and three other ranks. `bands`: the label of each row that
    holds all ranks of one coordinate or one node."""
    labels = []
    for row in rows:
        first, last = row[0], row[-1]
        if bands.get(row):
            labels.append(bands[row])
        elif len(row) == 1:
            labels.append(f"r{first}")
        elif last - first + 1 == len(row):
            labels.append(f"r{first}-{last}")
        else:
            labels.append(f"r{first} +{len(row) - 1}")
    return labels


def _column(steps: list[list[float]], lowest: bool) -> list[float]:
    """The values of a column: for each row, the worst value over `steps`. Missing values are ignored."""
    if len(steps) == 1:
        return steps[0]
    worst = min if lowest else max
    return [worst((v for v in values if v == v), default=math.nan) for values in zip(*steps, strict=True)]


def _range(table: list[list[float]]) -> tuple[float, float]:
    known = [value for column in table for value in column if abs(value) < float("inf")]
    return nice_range(min(known), max(known)) if known else (0.0, 1.0)


def _cells(
    line: StripLine, codes: list[int], at: int, glyphs: str, styles: tuple[Style, ...], colours: Palette
) -> None:
    """Add the cells of a row to its line. The column of the selected step has the cursor's background colour."""
    for (code, marked), run in groupby((code, x == at) for x, code in enumerate(codes)):
        count = len(list(run))
        glyph, style = (format.MISSING, colours.faint) if code == UNKNOWN else (glyphs[code], styles[code])
        if marked:
            style = style + Style(bgcolor=colours.cursor.bgcolor, reverse=colours.cursor.reverse)
        line.add(glyph * count, style)
