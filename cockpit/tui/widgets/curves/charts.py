"""Panel with several charts over a shared axis of steps. Zoom, pan and the cursor act on all charts."""

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding

from cockpit.data import format
from cockpit.data.comparison.compared_runs import By, RunCurves, last_common
from cockpit.data.curves.job_metrics import CurveMetric, change, reported
from cockpit.data.curves.view import View, clamp, extent
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.navigation.event_marks import CurveMark, curve_marks, glyph_of
from cockpit.data.scale import Range
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.chart import XAxis
from cockpit.tui.drawing.chart_lines import AXIS, Overlay, ruler
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.screen_bindings import CHARTS, CHARTS_KEYS
from cockpit.tui.session import Session
from cockpit.tui.widgets.curves.choices import RANGES, SMOOTHING, Choices
from cockpit.tui.widgets.curves.drawing import Chart, Frame, chart_lines, chart_of, looks
from cockpit.tui.widgets.panel import Panel

NARROW = 12  # with fewer columns, no chart is drawn


class Charts(Panel):
    """Charts of the job's metrics over its steps, with the curves of the compared runs."""

    TOPICS = frozenset({Topic.CURVES, Topic.EVENTS, Topic.BOARD})
    TITLE = "Curves"
    BINDINGS: ClassVar[list[Binding]] = CHARTS_KEYS  # type: ignore[assignment]
    ACTIONS = CHARTS
    EVERY = 3  # drawing ten charts takes longer than the rest of a screen
    HELP = (
        "Metrics of the job over its steps, on one axis. The heading of a chart shows the value under the cursor, or "
        "the newest one; `2.1..2.4` is the lowest and highest value of a bucket. A column shows the lowest and the "
        "highest value of its steps; the line has gaps where steps are missing. `✗` marks values that are not finite, "
        "`▲` and `▼` mark values off the scale. The scale `auto` leaves out the outer 1 % if they would compress the "
        "rest, `robust` always does, and `full` never does. The average is exponential; the title shows its half-life, "
        "and dots show the values behind it. The line below the charts has the marks: `◆` change, `!` `✗` alert, `✓` "
        "over, `↺` resumed, `◇` checkpoint, `⚑` your own. A digit counts the marks in one place, and e lists them. `╌` "
        "marks steps that are known only as buckets. Compared runs are read from their recordings."
    )

    def __init__(self, session: Session) -> None:
        super().__init__("charts")
        self.session = session
        self.choices = Choices()
        self._seen_step: int | None = None

    # ------------------------------------------------------------------------------------------ texts

    def title(self, store: Store) -> str:
        step = self.session.selection.step
        whole = extent(store.state)
        if whole is None:
            return self.TITLE
        first, last = store.curve_view.steps or whole
        where = (
            f"cursor at step {format.grouped(step)}"
            if step is not None
            else f"step {format.grouped(whole[1])}"
        )
        if step is not None and not whole[0] <= step <= whole[1]:
            where += " is not kept"
        parts = [self.TITLE, where]
        if store.curve_view.steps:
            parts.append(f"{format.grouped(first)} to {format.grouped(last)} of {format.grouped(whole[1])}")
        if life := self.choices.half_life(last - first):
            parts.append(f"average half-life {format.counted(life, 'step')}")
        return " · ".join(parts)

    def subtitle(self, store: Store) -> str:
        count = len(self.metrics(store))
        shown = self.choices.visible(count, self._rows)
        if len(shown) == 1 < count:
            return f"chart {shown.start + 1} of {count}"
        return f"charts {shown.start + 1} to {shown.stop} of {count}" if len(shown) < count else ""

    def choice(self) -> object:
        comparison = self.session.comparison
        return self.choices.key(), self.session.selection.step, comparison.revision, self._marks_of_user()

    def _marks_of_user(self) -> tuple[tuple[int, str], ...]:
        """The step and the text of each of the user's own marks."""
        return tuple((mark.step, mark.text) for mark in self.session.store.named_marks)

    # ---------------------------------------------------------------------------------------- drawing

    def update_from(self, store: Store) -> None:
        step = self.session.selection.step
        if step != self._seen_step:
            self._seen_step = step
            view = store.curve_view.steps
            if step is not None and view and not view[0] <= step <= view[1]:
                self._centre(store, step)
        self.session.comparison.show(store.curve_view.steps)
        super().update_from(store)

    @property
    def _rows(self) -> int:
        """The number of rows for the charts: the panel's height without the ruler, the row of marks, the legend and the
        note."""
        return self.content_size.height - 2 - bool(self.session.comparison.others) - bool(self._note())

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        whole = extent(store.state)
        if whole is None or width < AXIS + NARROW:
            return [StripLine().add(f"{format.MISSING} the curves begin with the first step", colours.faint)]
        legend = self._legend(store, width, colours)
        frame = self._frame(store, width - AXIS, whole, colours)
        rows = max(2, height - 2 - len(legend))
        known = _known(store)
        charts = self.choices.charts(known, rows)
        shown = self.choices.visible(len(charts), rows)
        lines = list(legend)
        drawn: list[Chart] = []
        quiet = [number for number in shown if charts[number] not in known and len(frame.runs) == 1]
        each, left = divmod(rows - 2 * len(quiet), max(1, len(shown) - len(quiet)))
        for number in shown:
            metric = charts[number]
            mine = 2 if number in quiet else each + (left > 0)
            left -= number not in quiet
            log, mode = metric.key in self.choices.logarithmic, self.choices.range_of(metric.key)
            drawn.append(self._chart(store, metric, frame, mine - 1, log, mode))
            current = number == self.choices.current and len(charts) > 1
            some = chart_lines(drawn[-1], frame, mine - 1, log, mode, current)
            lines += [*some, *[StripLine()] * (mine - len(some))]
        lines.append(self._ruler(frame, drawn, store, colours))
        lines.append(self._lane(frame, curve_marks(store, self._marks_of_user()), colours))
        return lines

    def _chart(
        self, store: Store, metric: CurveMetric, frame: Frame, rows: int, log: bool, mode: Range
    ) -> Chart:
        """The chart of a metric, drawn without a cursor. The result is cached, so moving the cursor does not redraw the
        curves."""
        version = (frame.axis, frame.by, frame.half_life, id(frame.colours), rows, log, mode)
        also = (*version, self.session.comparison.revision, store.curve_view.steps, len(frame.runs))
        name = ("chart", metric.key)
        return store.once(name, (Topic.CURVES,), lambda: chart_of(metric, frame, rows, log, mode), also)

    def _frame(self, store: Store, columns: int, whole: View, colours: Palette) -> Frame:
        """What all charts have in common: the x axis, the runs, the cursor and the vertical lines at marks."""
        comparison = self.session.comparison
        own = comparison.own
        mine = RunCurves(own.name, store, progress=own.progress) if own else RunCurves(store.run, store)
        runs = [mine, *comparison.others]
        by = comparison.by if comparison.others and comparison.is_known(comparison.by) else By.STEP
        ends: list[float] = []
        for run in runs[:1] if store.curve_view.steps else runs:
            span = store.curve_view.steps or extent(run.store.state)
            ends += [x for step in span or () if (x := run.progress.x(by, step)) is not None]
        first, last = (min(ends), max(ends)) if ends else (float(whole[0]), float(whole[1]))
        axis = XAxis(first, last if last > first else first + 1, columns)
        steps = (store.curve_view.steps or whole)[1] - (store.curve_view.steps or whole)[0]
        step = self.session.selection.step
        cursor = None if step is None else mine.progress.x(by, step)
        at = None if cursor is None else axis.column(cursor)
        verticals = {}
        for mark in curve_marks(store, self._marks_of_user()):
            if mark.kind.vertical and (x := mine.progress.x(by, mark.step)) is not None:
                style = colours.mark if mark.kind.vertical == "╷" else colours.level[mark.level]
                verticals[axis.column(x)] = (mark.kind.vertical, style)
        return Frame(axis, by, runs, step, self.choices.half_life(steps), Overlay(verticals, (), at), colours)

    def _ruler(self, frame: Frame, drawn: Sequence[Chart], store: Store, colours: Palette) -> StripLine:
        left, right = (_place_text(frame.by, x) for x in (frame.axis.first, frame.axis.last))
        per_step = frame.axis.dots if frame.by is By.STEP else 0.0
        found = [one for chart in drawn for one in chart.segments[0] if one.points]
        coarse = [one for one in found if per_step and one.width > max(1, 2 / per_step)]
        widest = max(coarse, key=lambda one: len(one.points), default=None)
        return ruler(frame.axis, left, right, [widest] if widest else [], frame.axis, colours)

    def _lane(self, frame: Frame, marks: Sequence[CurveMark], colours: Palette) -> StripLine:
        """The row of marks below the charts. If several marks share a column, the column shows how many there are."""
        own = frame.runs[0].progress
        by_column: dict[int, list[CurveMark]] = {}
        for mark in marks:
            x = own.x(frame.by, mark.step)
            if x is not None and 0 <= (column := frame.axis.column(x)) < frame.axis.columns:
                by_column.setdefault(column, []).append(mark)
        line = StripLine().add("marks e ".rjust(AXIS), colours.faint)
        for column, here in sorted(by_column.items()):
            line.pad_to(AXIS + column, colours.text)
            worst = max(
                here, key=lambda mark: (mark.level.value == "✗", mark.level.value == "!", mark.kind.word)
            )
            glyph = glyph_of(worst) if len(here) == 1 else str(len(here)) if len(here) < 10 else "+"
            style = colours.level[worst.level] if worst.kind.word == "alert" else colours.mark
            line.add(glyph, style)
        return line

    def _note(self) -> str:
        comparison = self.session.comparison
        return f"reading {comparison.loading} ..." if comparison.loading else comparison.error

    def _legend(self, store: Store, width: int, colours: Palette) -> list[StripLine]:
        """The legend: the line style of each run, how the runs are aligned, and the last common step, on a second line
        if necessary."""
        comparison = self.session.comparison
        lines: list[StripLine] = []
        line = StripLine()
        if comparison.others:
            own = comparison.own
            runs = [RunCurves(own.name if own else store.run, store), *comparison.others]
            for run, look in zip(runs, looks(colours), strict=False):
                line.add(f"{look.sample} {look.letter} ", look.style)
                simulated = " (simulated)" if run.store.simulated and not store.simulated else ""
                line.add(f"{run.name}{simulated}   ", colours.text)
            known = comparison.is_known(comparison.by)
            how = f"by {comparison.by.value}" if known else f"by step, {comparison.by.value} unknown"
            common = last_common(runs[0], runs[1])
            text = "no common step" if common is None else f"last common step {format.grouped(common)}"
            aligned = StripLine().add(how, colours.dim)
            aligned.add(f" · {text}{self._at_common(runs[0], runs[1], common)}", colours.dim)
            fits = line.width + aligned.width <= width
            lines = (
                [line.extend(aligned)] if fits else [line, StripLine().add("  ", colours.dim).extend(aligned)]
            )
        if note := self._note():
            lines.append(
                StripLine().add(note, colours.level[Level.WARN] if comparison.error else colours.dim)
            )
        return lines

    def _at_common(self, one: RunCurves, other: RunCurves, step: int | None) -> str:
        """A phrase with the values of the current metric in two runs at `step`, the last step that both runs have."""
        metric = self.metric
        if step is None:
            return ""
        first, second = (run.reading(metric, step) for run in (one, other))
        if not first or not second or first.width + second.width > 2:
            return ""
        relative = change(second.low, first.low)
        text = f": {metric.title.lower()} {metric.text(first.low)} against {metric.with_unit(second.low)}"
        return text + (f" ({relative})" if relative else "")

    # ------------------------------------------------------------------------------- view and cursor

    def _centre(self, store: Store, step: int) -> None:
        """Centre the view on a step."""
        whole = extent(store.state)
        if store.curve_view.steps and whole and whole[0] <= step <= whole[1]:
            first, last = store.curve_view.steps
            begin = step - (last - first) // 2
            store.curve_view.show(clamp((begin, begin + last - first), whole))

    def action_scale(self, by: float) -> None:
        with self._store.lock:
            self._store.curve_view.zoom(by, self.session.selection.step)
        self.redraw()

    def action_pan(self, by: float) -> None:
        with self._store.lock:
            self._store.curve_view.pan(by)
        self.redraw()

    def action_all(self) -> None:
        with self._store.lock:
            self._store.curve_view.show(None)
        self.redraw()

    def action_cursor(self, by: int) -> None:
        """Move the cursor `by` columns or, if a step is wider than a column, `by` steps. A cursor that is moved past
        the newest step follows the run."""
        selection = self.session.selection
        with self._store.lock:
            whole = extent(self._store.state)
            if whole is None or self.content_size.width < AXIS + NARROW:
                return
            frame = self._frame(self._store, self.content_size.width - AXIS, whole, self.colours)
            mine, axis = frame.runs[0].progress, frame.axis
            view = self._store.curve_view.steps or whole
            here = selection.step if selection.step is not None else view[1]
            x = mine.x(frame.by, here)
            beside = None if x is None else mine.step(frame.by, axis.x(axis.column(x) + by))
            moved = here + by if beside is None or abs(beside - here) < abs(by) else beside
            if moved > whole[1] or (selection.step == whole[1] and by > 0):
                selection.step = None
            else:
                selection.step = max(whole[0], moved)
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        """Put the cursor where the user clicks."""
        offset = event.get_content_offset(self)
        with self._store.lock:
            whole = extent(self._store.state)
            if offset is None or whole is None or offset.x < AXIS:
                return
            frame = self._frame(self._store, self.content_size.width - AXIS, whole, self.colours)
            step = frame.runs[0].progress.step(frame.by, frame.axis.x(offset.x - AXIS))
            if step is not None:
                self.session.selection.step = max(whole[0], min(whole[1], step))
        self.redraw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.prevent_default()
        self.action_scale(0.5)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.prevent_default()
        self.action_scale(2)

    # ------------------------------------------------------------------------------------------ charts

    def metrics(self, store: Store) -> Sequence[CurveMetric]:
        """The metrics that have a chart, including charts that do not fit."""
        return self.choices.charts(_known(store), max(2, self._rows))

    @property
    def metric(self) -> CurveMetric:
        """The metric of the current chart."""
        with self._store.lock:
            charts = self.metrics(self._store)
        return charts[min(self.choices.current, len(charts) - 1)]

    def turn(self, by: int) -> bool:
        """Move to another chart: `by` positions forward, or backward if `by` is negative. Return False if there is no
        chart at that position."""
        at = self.choices.current + by
        with self._store.lock:
            if not 0 <= at < len(self.metrics(self._store)):
                return False
        self.choices.current = at
        self.redraw()
        return True

    def choose(self, keys: Sequence[str]) -> None:
        """Show charts of the metrics with these keys; with no keys, show the default charts."""
        self.choices.chosen = list(keys) or None
        self.choices.current = min(self.choices.current, max(0, len(keys) - 1))
        self.redraw()

    def action_add(self) -> None:
        """Show one more metric: the first metric that has no chart."""
        with self._store.lock:
            known = _known(self._store)
            there = [metric.key for metric in self.metrics(self._store)]
        more = next((metric.key for metric in known if metric.key not in there), None)
        if more is not None:
            self.choices.chosen = [*there, more]
            self.choices.current = len(there)
            self.redraw()

    def action_remove(self) -> None:
        """Remove the current chart, unless it is the only one."""
        current = self.metric
        with self._store.lock:
            others = [one.key for one in self.metrics(self._store) if one is not current]
        if others:
            self.choose(others)

    def action_log(self) -> None:
        self.choices.logarithmic ^= {self.metric.key}
        self.redraw()

    def action_range(self) -> None:
        key = self.metric.key
        self.choices.ranges[key] = RANGES[(RANGES.index(self.choices.range_of(key)) + 1) % len(RANGES)]
        self.redraw()

    def action_smooth(self) -> None:
        self.choices.smoothing = (self.choices.smoothing + 1) % len(SMOOTHING)
        self.redraw()

    def action_align(self) -> None:
        comparison = self.session.comparison
        ways = list(By)
        comparison.align(ways[(ways.index(comparison.by) + 1) % len(ways)])
        self.redraw()


def _known(store: Store) -> list[CurveMetric]:
    """The metrics that the run reports."""
    return store.once("reported metrics", (Topic.CURVES,), lambda: reported(store.state))


def _place_text(by: By, x: float) -> str:
    """A position on the axis as text, such as ``12 340``, ``1.2 M tokens`` or ``2 h``."""
    if by is By.TOKENS:
        return f"{format.si(x)} tokens"
    return format.age(x) if by is By.TIME else format.grouped(round(x))
