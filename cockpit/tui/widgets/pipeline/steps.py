"""Panel with the time of every step. The panel also marks the kept steps, the knob changes and the selected step."""

import math
from collections.abc import Callable

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.log.run_log import marks
from cockpit.data.metrics import median
from cockpit.data.pipeline.step_comparison import step_times
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine, column
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.screen_bindings import STEPS
from cockpit.tui.session import Selection
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.pipeline.timeline import shown_step

AXIS = 9
TIMELINE_KEPT, PHASES_KEPT, SELECTED = "•", "·", "▲"
SLOW = 0.25  # from this time above the median on, a column has the colour of a warning


class StepsPanel(Panel):
    """The panel with the step times of the run."""

    TOPICS = frozenset({Topic.CURVES, Topic.PIPELINE, Topic.BOARD})
    TITLE = "Steps"
    OPENS = "curves"
    EVERY = 4
    ACTIONS = STEPS
    HELP = (
        "The time of each step; a column with several steps shows the slowest. Below the columns, `•` marks a step "
        "whose timeline is kept, `·` a step whose phases are kept, `▲` the selected step, and `╷` a knob change. The "
        "cockpit keeps the newest steps, the slowest, and an even selection of the others, but only of the steps since "
        "it attached."
    )

    def __init__(self, id: str, selection: Selection) -> None:
        super().__init__(id)
        self.selection = selection

    def choice(self) -> object:
        return self.selection.step

    def title(self, store: Store) -> str:
        times = step_times(store)
        if not times:
            return "Steps"
        slowest = max(times[1:] or times, key=lambda point: point[1])
        middle = median(ms for _, ms in times)
        return (
            f"Steps · median {format.duration_ms(middle).strip()} · "
            f"slowest {format.duration_ms(slowest[1]).strip()} at step {format.grouped(slowest[0])}"
        )

    def subtitle(self, store: Store) -> str:
        changes = marks(store)
        return f"╷ step {format.grouped(changes[-1].step)}: {changes[-1].label}" if changes else ""

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        times = step_times(store)
        columns, rows = width - AXIS, height - 2
        if not times or columns < 8 or rows < 1:
            return [StripLine().add(f"{format.MISSING} no step is done yet", colours.faint)]
        first, last = times[0][0], times[-1][0]
        count = last - first + 1
        used = min(columns, count)
        per_column = -(-count // used)

        def place(step: int) -> int:
            return (step - first) * used // count

        worst = [math.nan] * used
        for step, ms in times:
            at = place(step)
            if not worst[at] >= ms:  # written with `not`, so that it is also true for NaN
                worst[at] = ms
        middle = median(ms for _, ms in times) or 0.0
        # The first step is always slow, so it does not set the scale if there are other steps.
        top = max((ms for step, ms in times if step > 0 or len(times) == 1), default=middle) or 1.0
        bars = [None if math.isnan(ms) else column(ms / top, rows) for ms in worst]
        lines = []
        for row in range(rows):
            label = top if row == 0 else 0.0 if row == rows - 1 and rows > 1 else None
            line = StripLine()
            line.add("" if label is None else format.duration_ms(label).rjust(AXIS - 1), colours.dim)
            line.pad_to(AXIS, colours.dim)
            for at in range(used):
                bar = bars[at]
                slow = middle and worst[at] > middle * (1 + SLOW)
                style = colours.level[Level.WARN] if slow else colours.curve
                line.add(
                    format.MISSING if bar is None and row == rows - 1 else bar[row] if bar else " ", style
                )
            lines.append(line)
        lines.append(self._kept(store, place, used, first, colours))
        note = f"up to {per_column} steps a column: the slowest" if per_column > 1 else ""
        key = f"{TIMELINE_KEPT} timeline  {PHASES_KEPT} phases kept  {SELECTED} shown  w slowest  , . back and on"
        left, right = format.grouped(first), format.grouped(last)
        ruler = StripLine().pad_to(AXIS, colours.dim).add(left, colours.dim)
        for text in (note, key):
            if text and ruler.width + len(text) + 4 + len(right) <= width:
                ruler.add(f"  {text}", colours.faint)
        at = max(AXIS + max(used, len(left) + len(right) + 1) - len(right), ruler.width + 1)
        lines.append(ruler.pad_to(at, colours.dim).add(right, colours.dim))
        return lines

    def _kept(
        self, store: Store, place: Callable[[int], int], used: int, first: int, colours: Palette
    ) -> StripLine:
        """The line of glyphs under the columns, one glyph per column. A column of steps gets the glyph of the first of
        these that it contains: the shown step, a knob change or a step that the user marked, a step whose timeline is
        still in memory, a step whose phases are still in memory."""
        cells = [(" ", colours.faint)] * used
        for glyph, style, steps in (
            (PHASES_KEPT, colours.dim, store.phases.steps),
            (TIMELINE_KEPT, colours.text, store.timelines.steps),
            ("╷", colours.mark, [mark.step for mark in marks(store)]),
            (SELECTED, colours.strong, [shown_step(store, self.selection)]),
        ):
            for step in steps:
                if step is not None and 0 <= (at := place(step)) < used and step >= first:
                    cells[at] = (glyph, style)
        line = StripLine().add("kept", colours.dim).pad_to(AXIS, colours.dim)
        for glyph, style in cells:
            line.add(glyph, style)
        return line
