"""Panel with the list of marks on the curves (such as knob changes, alerts and checkpoints), newest first. Each entry
shows the step and what happened; the selected entry also shows the current chart's metric before and after the mark.
"""

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding

from cockpit.data import format
from cockpit.data.curves.job_metrics import CurveMetric
from cockpit.data.curves.segments import segments
from cockpit.data.log.outcomes import brought, brought_text
from cockpit.data.navigation.event_marks import ALERT, CurveMark, around, curve_marks, glyph_of
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.screen_bindings import MARKS, MARKS_KEYS
from cockpit.tui.widgets.curves.charts import Charts
from cockpit.tui.widgets.panel import Panel

STEP = 9  # width of a step
INDENT = STEP + 4  # width of the effect of a mark


class MarkList(Panel):
    """The list of marks on the curves: knob changes, alerts, resumes, checkpoints, and the user's own marks. Enter
    moves the cursor of the charts to the selected mark."""

    TOPICS = frozenset({Topic.CURVES, Topic.EVENTS, Topic.BOARD})
    TITLE = "Marks"
    BINDINGS: ClassVar[list[Binding]] = MARKS_KEYS  # type: ignore[assignment]
    ACTIONS = MARKS
    EVERY = 3
    HELP = (
        "Changes, alerts, resumes, checkpoints and your own marks, newest first. Below the selected mark are the "
        "medians of the current metric over the 16 steps before and after it (`~`: from buckets); for a change, also "
        "its measured effect beside the predicted one. `~` before a step means that the step is estimated from the "
        "time. Enter moves the cursor of the charts to the selected mark."
    )

    def __init__(self, charts: Charts) -> None:
        super().__init__("marks")
        self._of = charts
        # index of the selected mark, oldest first; None: the last mark up to the cursor
        self._at: int | None = None
        self._count = 0

    def choice(self) -> object:
        return self._at, self._of.session.selection.step, self._of.choices.key(), self._of._marks_of_user()

    def subtitle(self, store: Store) -> str:
        count = len(curve_marks(store, self._of._marks_of_user()))
        return f"{count} · enter jumps" if count else ""

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        marks = curve_marks(store, self._of._marks_of_user())
        self._count = len(marks)
        if not marks:
            return [StripLine().add(f"{format.MISSING} no change, alert or checkpoint yet", colours.faint)]
        at = self._selected(marks)
        metric = self._of.metric
        details = self._details(store, marks[at], metric, width, colours)
        rows = max(1, height - len(details))
        newest = len(marks) - 1
        first = max(0, min(newest - at - rows // 2, len(marks) - rows))  # rows above the first shown one
        lines = []
        for number in range(newest - first, max(-1, newest - first - rows), -1):
            lines.append(_row(marks[number], number == at, self.has_focus, width, colours))
            if number == at:
                lines += details
        return lines

    def _selected(self, marks: Sequence[CurveMark]) -> int:
        """The index of the selected mark: the mark that the user chose, or the last mark at or before the cursor of the
        charts."""
        if self._at is not None:
            return min(self._at, len(marks) - 1)
        step = self._of.session.selection.step
        before = [number for number, mark in enumerate(marks) if step is None or mark.step <= step]
        return before[-1] if before else 0

    def _details(
        self, store: Store, mark: CurveMark, metric: CurveMetric, width: int, colours: Palette
    ) -> list[StripLine]:
        """Lines about a mark: the mark's text if it is too long for the list, the current metric before and after the
        mark and, for a knob change, the measured effect beside the predicted one."""
        found = segments(store.state, metric.key, store.curve_view.steps, store.curve_view.detail)
        room = max(8, width - INDENT)
        texts = format.wrapped(mark.text, room) if len(mark.text) > room else []
        if text := around(found, metric, mark.step):
            texts += format.wrapped(f"{metric.title} {text}", room)
        if mark.command:
            for one in brought(store.state, mark.command):
                texts += format.wrapped(brought_text(one), room)
        return [StripLine().add(" " * INDENT, colours.dim).add(text, colours.dim) for text in texts]

    def action_move(self, by: int) -> None:
        """Select an older (`by` = 1) or a newer (`by` = -1) mark."""
        with self._store.lock:
            marks = curve_marks(self._store, self._of._marks_of_user())
            if marks:
                self._at = max(0, min(len(marks) - 1, self._selected(marks) - by))
        self.redraw()

    def action_jump(self) -> None:
        """Move the charts' cursor to the selected mark, and return to the charts."""
        with self._store.lock:
            marks = curve_marks(self._store, self._of._marks_of_user())
            if marks:
                self._of.session.selection.step = marks[self._selected(marks)].step
        self._of.focus()

    def open(self) -> None:
        """Show the list, and select the mark at the charts' cursor."""
        self._at = None
        self.focus()


def _row(mark: CurveMark, selected: bool, focused: bool, width: int, colours: Palette) -> StripLine:
    style = colours.cursor if selected and focused else colours.text
    step = f"{'~' if mark.estimated else ''}{format.grouped(mark.step)}"
    line = StripLine().add("▸" if selected else " ", colours.accent).add(f"{step:>{STEP}} ", style)
    glyph = colours.level[mark.level] if mark.kind is ALERT else colours.mark
    return line.add(f"{glyph_of(mark)} ", glyph).add(f"{mark.text}", style)
