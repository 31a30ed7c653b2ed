"""A list for choosing a metric of ranks; each metric is shown with its median and its worst rank."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from cockpit.data import format
from cockpit.data.diagnosis.statement import Level
from cockpit.data.metrics import Against, Metric, available, median, outlier_distance, read
from cockpit.data.store import Store
from cockpit.tui.dialogs.dialog import Dialog
from cockpit.tui.drawing.strips import StripLine, blank, named
from cockpit.tui.drawing.theme import Palette, palette
from cockpit.tui.keys.general_bindings import PICKER_KEYS
from cockpit.tui.session import Selection

REFRESH_S = 1.0
TITLE = 22  # columns for the name of a metric
VALUE = 9  # columns for a number
UNIT = 7
EQUAL = 0.005  # with a smaller deviation, no rank is worse than the others
OFF = 8  # columns for the deviation


class MetricList(Widget):
    """The list of metrics, with one line per metric."""

    def __init__(self, store: Store, selection: Selection) -> None:
        super().__init__(id="metrics")
        self._store, self._selection = store, selection
        with store.lock:
            self.metrics = available(store)
        keys = [metric.key for metric in self.metrics]
        self.at = keys.index(selection.metric) if selection.metric in keys else 0
        self._lines: list[Strip] = []

    def on_mount(self) -> None:
        self.read()
        self.set_interval(REFRESH_S, self.read)

    def read(self) -> None:
        """Redraw the list with the metrics' current values."""
        colours = palette(self.app.theme)
        with self._store.lock:
            lines = [_heading(colours)]
            lines += [
                metric_line(self._store, metric, self._selection.step, number == self.at, colours)
                for number, metric in enumerate(self.metrics)
            ]
        self._lines = [line.strip(self.size.width, colours.text) for line in lines]
        self.refresh()

    def on_resize(self) -> None:
        self.read()

    def move(self, by: int) -> None:
        self.at = (self.at + by) % len(self.metrics)
        self.read()

    def render_line(self, y: int) -> Strip:
        return (
            self._lines[y] if y < len(self._lines) else blank(self.size.width, palette(self.app.theme).text)
        )

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.metrics) + 1


def _heading(colours: Palette) -> StripLine:
    line = StripLine().add("  " + "metric".ljust(TITLE), colours.dim)
    return line.add("median".rjust(VALUE) + "".ljust(UNIT) + "worst".rjust(VALUE), colours.dim)


def metric_line(store: Store, metric: Metric, step: int | None, chosen: bool, colours: Palette) -> StripLine:
    """A line with a metric, its median, its unit and its worst rank, such as ``own time  262 ms  358 +37 %  r3 !``."""
    readings = read(store, metric, Against.PEERS, step)
    line = StripLine().add("▸ " if chosen else "  ", colours.accent)
    line.add(named(format.clean(metric.title), TITLE), colours.cursor if chosen else colours.text)
    line.add(format.fixed(median(readings.values_), VALUE, metric.digits), colours.text)
    line.add(f" {metric.unit}".ljust(UNIT), colours.dim)
    known = [(value, at) for at, value in enumerate(readings.values_) if value == value]
    if not known:
        return line
    if not metric.worse:  # neither end of the range is worse
        low, high = min(known)[0], max(known)[0]
        line.add(format.fixed(low, VALUE, metric.digits), colours.dim)
        return line.add(f" to {high:.{metric.digits}f}", colours.dim)
    # If the median is zero, there is no relative deviation, so the value decides.
    worst, at = max(
        known, key=lambda pair: (readings.deviations[pair[1]] * metric.worse, pair[0] * metric.worse)
    )
    deviation, best = readings.deviations[at], min(known) if metric.worse > 0 else max(known)
    marked = deviation * metric.worse >= outlier_distance(store)
    marked |= metric.normal is not None and worst > metric.normal
    style = colours.level[Level.WARN] if marked else colours.text
    line.add(format.fixed(worst, VALUE, metric.digits), style)
    off = "" if not readings.baselines[at] else format.excess(deviation)
    line.add(off.rjust(OFF), style)
    if abs(worst - best[0]) > EQUAL * abs(worst):
        line.add(f"  r{readings.ranks[at]}", colours.dim)
    return line.add(f" {Level.WARN.value}" if marked else "", style)


class MetricPicker(Dialog[str | None]):
    """A dialog that returns the key of the chosen metric, or None."""

    BINDINGS: ClassVar[list[Binding]] = PICKER_KEYS  # type: ignore[assignment]

    def __init__(self, store: Store, selection: Selection) -> None:
        super().__init__()
        self._list = MetricList(store, selection)

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="dialog") as dialog:
            dialog.border_title = "Metric of the ranks"
            dialog.border_subtitle = "↑ ↓ choose · enter shows · esc closes"
            dialog.can_focus = False
            yield self._list

    def action_move(self, by: int) -> None:
        self._list.move(by)
        dialog = self.query_one("#dialog", VerticalScroll)
        top, height = dialog.scroll_offset.y, dialog.content_size.height
        line = self._list.at + 1
        if not top <= line < top + height:
            dialog.scroll_to(y=max(0, line - height // 2), animate=False)

    def action_choose(self) -> None:
        self.dismiss(self._list.metrics[self._list.at].key)

    def action_close(self) -> None:
        self.dismiss(None)
