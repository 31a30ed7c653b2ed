"""The details of the expert under the cursor: its state, the ranks that hold it, and its load over the kept steps."""

from collections.abc import Sequence

from agents.alerts.training import DEAD
from cockpit.data import format
from cockpit.data.experts import Cell, Shown, capacity, hottest, shown, unwell
from cockpit.data.history.frames import Range
from cockpit.data.scale import Scale, nice_range
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.chart import XAxis
from cockpit.tui.drawing.chart_lines import AXIS, Line, Overlay, chart_rows, draw_lines
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.session import Selection
from cockpit.tui.widgets.experts.bars import bars
from cockpit.tui.widgets.experts.facts import expert_facts, name
from cockpit.tui.widgets.panel import Panel

WITH_BARS = 140  # from this width on, the bars of the layer are beside the chart
LEAST_CHART = 4  # lines


class ExpertDetails(Panel):
    """The panel with the facts about one expert and the chart of its load."""

    TOPICS = frozenset({Topic.EXPERTS, Topic.GRID, Topic.BOARD, Topic.EVENTS})
    TITLE = "Expert"
    OPENS = "experts"
    EVERY = 2
    HELP = (
        "The expert under the cursor of the map; without a cursor, the worst one. `held by` names the ranks that "
        "compute it, as they report it. The chart is its load relative to the fair share at each kept sample; old "
        "samples are thinned, and two lines then join the lowest and the highest values. On a wide screen, the bars at "
        "the right are all experts of its layer."
    )

    def __init__(self, selection: Selection) -> None:
        super().__init__("expert")
        self.selection = selection
        self._unselected: Cell | None = None  # the expert that is shown while none is selected

    def choice(self) -> object:
        return self.selection.layer, self.selection.expert, self.selection.step

    def cell(self, store: Store, at: Shown) -> Cell | None:
        """The selected expert or, if none is selected, the worst of the dead and hot experts. If no expert is dead or
        hot, the panel keeps the expert that it already shows (at first, the hottest), so that the chart does not jump
        from one expert to another."""
        layer, expert = self.selection.layer, self.selection.expert
        if layer is not None and expert is not None:
            return layer, expert
        if worst := next((one.cell for one in unwell(store, at)), None):
            self._unselected = worst
        elif self._unselected is None or at.load(self._unselected) is None:
            self._unselected = next(iter(hottest(at)), None)
        return self._unselected

    def title(self, store: Store) -> str:
        at = shown(store, self.selection.step)
        cell = self.cell(store, at) if at else None
        if at is None or cell is None:
            return "Expert"
        if self.selection.expert is not None:
            return f"Expert · {name(cell)}"
        which = f"{name(cell)}, the worst" if at.streak(cell) else name(cell)
        return f"Expert · {which} · w or arrow keys select one"

    def subtitle(self, store: Store) -> str:
        kept = store.expert_history.loads
        if not len(kept):
            return ""
        steps = f"{format.grouped(kept[0].first)}-{format.grouped(kept[len(kept) - 1].last)}"
        samples = sum(kept[number].records for number in range(len(kept)))
        return f"{format.counted(samples, 'sample')} of the steps {steps}"

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        at = shown(store, self.selection.step)
        if at is None:
            return [StripLine().add(f"{format.MISSING} no load of a single expert yet", colours.faint)]
        cell = self.cell(store, at)
        lines = expert_facts(store, at, cell, colours)
        room = height - len(lines)
        if cell is None or at.load(cell) is None or room < LEAST_CHART:
            return lines
        limit = capacity(store, at.frame.last)
        cap = limit if isinstance(limit, float | int) else None
        step = self.selection.step
        beside = width >= WITH_BARS
        left = width // 2 if beside else width
        version = (at.number, at.frame, cell, cap, step, width, height, id(colours))
        lines += store.once(
            "expert chart", (), lambda: load_chart(at, cell, cap, step, left, room, colours), version
        )
        if not beside:
            return lines
        right = store.once(
            "expert bars", (), lambda: _bars(at, cell, cap, width - left - 2, height, colours), version
        )
        return beside_each_other(lines, right, left, colours)


def _bars(
    at: Shown, cell: Cell, cap: float | None, width: int, height: int, colours: Palette
) -> list[StripLine]:
    """The bars of all experts of the layer, under a heading."""
    title = StripLine().add(f"all experts of layer {cell[0]}, load over fair share", colours.dim)
    order = range(len(at.row(cell[0])[0]))
    return [title, *bars(at, cell[0], order, cap, cell[1], width, height - 1, colours)]


def beside_each_other(
    left: Sequence[StripLine], right: Sequence[StripLine], width: int, colours: Palette
) -> list[StripLine]:
    """Lines that show `left` and `right` side by side. The left part is `width` cells wide."""
    lines = []
    for y in range(max(len(left), len(right))):
        line = StripLine()
        for segment in (left[y] if y < len(left) else StripLine()).strip(width, colours.text):
            line.add(segment.text, segment.style or colours.text)
        line.add("  ", colours.text)
        lines.append(line.extend(right[y]) if y < len(right) else line)
    return lines


def load_chart(
    at: Shown, cell: Cell, cap: float | None, step: int | None, width: int, height: int, colours: Palette
) -> list[StripLine]:
    """The chart of an expert's load over the kept steps, with the capacity and the selected step."""
    found = at.history.load_over_time(*cell)
    if len(found) < 2:
        return [StripLine().add(f"{format.MISSING} its chart begins with the second sample", colours.faint)]
    rows, columns = height - 1, width - AXIS
    first, last = found[0].first, found[-1].last
    axis = XAxis(first, max(last, first + 1), columns)
    high = max(one.high for one in found)
    top = max(2.0, high, min(cap, 2 * max(high, 1.0)) if cap else 0.0)
    levels = [(1.0, "┄", colours.faint)]
    if cap is not None:
        levels.insert(0, (cap, "╌", colours.mark))
    over = Overlay({axis.column(step): ("│", colours.accent)} if step is not None else {}, levels)
    scale = Scale(*nice_range(0.0, top))
    drawn = chart_rows(
        draw_lines([Line(_lines(found), colours.curve)], axis, rows, scale), axis, rows, scale, over, colours
    )
    return [*drawn, _ruler(found, width, cap, colours)]


def _lines(found: Sequence[Range]) -> list[list[tuple[int, float]]]:
    """The points of the line that shows an expert's load by step. If old samples are merged, the line goes through the
    highest load of each merged sample, and a second line goes through the lowest."""
    lows = [(one.last, one.low) for one in found]
    highs = [(one.first, one.high) for one in found]
    merged = [number for number, one in enumerate(found) if one.low != one.high]
    return [highs, lows[: merged[-1] + 2]] if merged else [highs]


def _ruler(found: Sequence[Range], width: int, cap: float | None, colours: Palette) -> StripLine:
    left, right = format.grouped(found[0].first), format.grouped(found[-1].last)
    notes = ["load over fair share"]
    if cap is not None:
        notes.append(f"╌ capacity {cap:.3g}×")
    if any(one.first != one.last for one in found):
        notes.append("old samples thinned, extremes kept")
    if any(one.low < DEAD for one in found):
        notes.append(f"under {100 * DEAD:.0f} % is dead")
    room = width - AXIS - len(left) - len(right) - 2
    while notes and len(" · ".join(notes)) > room:
        notes.pop()
    line = StripLine().add("└".rjust(AXIS), colours.dim).add(left, colours.dim)
    text = " · ".join(notes)
    line.pad_to(AXIS + len(left) + 1 + max(0, (room - len(text)) // 2), colours.dim)
    return line.add(text, colours.faint).pad_to(width - len(right), colours.dim).add(right, colours.dim)
