"""Panel with the curve of one metric over steps, downsampled to the width of the panel, with a mark at each knob
change."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding

from agents.protocol import Summary
from cockpit.data import format
from cockpit.data.curves.segments import Segment, polylines, segments
from cockpit.data.log.run_log import Mark, marks
from cockpit.data.scale import Range, choose
from cockpit.data.store import Store, Topic
from cockpit.data.traffic.traffic import summary_at
from cockpit.tui.drawing.chart import XAxis
from cockpit.tui.drawing.chart_lines import AXIS, Line, Overlay, chart_rows, draw_lines, ruler
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.screen_bindings import CURVES, CURVES_KEYS
from cockpit.tui.session import Selection
from cockpit.tui.widgets.panel import Panel


@dataclass(frozen=True)
class Series:
    """A metric of the whole job, plotted against the step."""

    key: str
    title: str
    unit: str
    metric: str  # a key of `agents.state.metric_curves.METRICS`
    get: Callable[[Summary], float | None]


LOSS = Series("loss", "Loss", "", "loss", lambda summary: summary.loss)
THROUGHPUT = Series("throughput", "Throughput", "tok/s", "tokens_per_s", lambda summary: summary.tokens_per_s)


class CurvePanel(Panel):
    """The panel with the curve of one metric, over the whole run or over the steps in view."""

    TOPICS = frozenset({Topic.CURVES})
    TITLE = "Curve"
    OPENS = "curves"
    BINDINGS: ClassVar[list[Binding]] = CURVES_KEYS  # type: ignore[assignment]
    ACTIONS = CURVES
    HELP = (
        "One metric of the job over steps. `╷` marks a knob change; the newest change is written below. A column shows "
        "the lowest and the highest value of its steps. The line has gaps where steps are missing; `✗` marks values "
        "that are not finite. A live screen keeps older steps as buckets of equal size: where a bucket is wider than "
        "a column, `╌` marks it, and the line joins its first, lowest, highest and last value. A replay, and a "
        "live screen on the machine of the hub, read every step in view from the recording. `▲` and `▼` mark values "
        "off the scale, which leaves out a few outer values if they would compress all others."
    )
    # Fewer than three updates per second, because drawing a curve takes longer than the rest of the screen.
    EVERY = 3

    def __init__(self, series: Series, selection: Selection) -> None:
        super().__init__(series.key)
        self.series, self._selection = series, selection

    def choice(self) -> object:
        return self._selection.step

    def title(self, store: Store) -> str:
        step = self._selection.step
        summary = summary_at(store, step)
        if step is not None and summary is None:
            return f"{self.series.title} · the value at step {format.grouped(step)} is not kept"
        now = self.series.get(summary) if summary else None
        spelled = format.MISSING if now is None else (f"{now:.3f}" if abs(now) < 1000 else format.si(now))
        title = f"{self.series.title} · {spelled} {self.series.unit}".rstrip()
        return title if step is None else f"{title} · step {format.grouped(step)}"

    def subtitle(self, store: Store) -> str:
        # While a recording plays, the user may have marks at steps that it has not reached.
        changes = [mark for mark in marks(store) if store.step is not None and mark.step <= store.step]
        return f"╷ step {format.grouped(changes[-1].step)}: {changes[-1].label}" if changes else ""

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        view = store.curve_view
        found = segments(store.state, self.series.metric, view.steps, view.detail)
        if sum(len(one.points) for one in found) < 2:
            why = "fewer than two of these steps have values · 0 shows all steps" if view.steps else _NOT_YET
            return [StripLine().add(f"{format.MISSING} {why}", colours.faint)]
        return plot(found, marks(store), width, height, colours, self._selection.step)

    # -------------------------------------------------------------------------------------- view

    def action_scale(self, by: float) -> None:
        with self._store.lock:
            self._store.curve_view.zoom(by)
        self.redraw()

    def action_pan(self, by: float) -> None:
        with self._store.lock:
            self._store.curve_view.pan(by)
        self.redraw()

    def action_all(self) -> None:
        with self._store.lock:
            self._store.curve_view.show(None)
        self.redraw()


_NOT_YET = "the curve begins with the second step"


def plot(
    found: Sequence[Segment],
    marks: Sequence[Mark],
    width: int,
    height: int,
    colours: Palette,
    selected: int | None = None,
) -> list[StripLine]:
    """Draw the curve with both axes in `width` x `height` cells, and a vertical line at the step `selected`."""
    rows, columns = height - 1, width - AXIS
    if rows < 1 or columns < 8:
        return []
    first, last = found[0].points[0][0], found[-1].points[-1][0]
    axis = XAxis(first, max(last, first + 1), columns)
    lines = list(polylines(found, axis.dots / 2))
    scale, _ = choose((value for line in lines for _, value in line), Range.AUTO)
    over = Overlay(
        {axis.column(mark.step): ("╷", colours.mark) for mark in marks if first <= mark.step <= last},
        cursor=None if selected is None else axis.column(selected),
        broken=frozenset(
            axis.column(step) for one in found for step, value in one.points if not math.isfinite(value)
        ),
    )
    layers = draw_lines([Line(lines, colours.curve)], axis, rows, scale)
    drawn = chart_rows(layers, axis, rows, scale, over, colours)
    coarse = [one for one in found if one.width > max(1, 2 / axis.dots)]
    return [*drawn, ruler(axis, format.grouped(first), format.grouped(last), coarse, axis, colours)]
