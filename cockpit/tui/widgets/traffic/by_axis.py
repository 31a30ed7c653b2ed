"""Panel with traffic by axis: bytes, time in collectives, and the exposed share of that time."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from agents.protocol import Traffic
from cockpit.data import format
from cockpit.data.store import Store, Topic
from cockpit.data.traffic.traffic import (
    AxisTraffic,
    axes_with_traffic,
    by_axis,
    byte_unit,
    expected,
    groups,
    summary_at,
    trend,
    trend_steps,
    why_none,
)
from cockpit.tui.drawing.strips import StripLine, column
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.session import Selection
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.traffic.missing import guide, no_traffic

NAME = 7  # width of the name of an axis
BAR = 8  # minimum width of the bar
INDENT = 2
TALL, TALL_CURVE = 48, 3  # from this height of the screen on, a curve has this many lines


class Scale(NamedTuple):
    """The units of the columns with bytes and with rates: the name of each unit, and how many bytes (or bytes/s) it
    stands for."""

    unit: str
    bytes: float
    rate_unit: str
    rate: float


class Column(NamedTuple):
    """A column of numbers: its heading, its width, and a function that gives the text for an axis. `rank` is the
    column's priority: if not all columns fit, those with the highest number are dropped first, and those with 1 are
    kept."""

    head: str
    width: int
    rank: int
    text: Callable[[AxisTraffic, Scale], str]
    exposed: bool = False  # dim if nothing is exposed


COLUMNS = (
    Column("sent", 9, 1, lambda row, scale: _sent(row, scale)),
    Column("time", 10, 1, lambda row, _: f"{format.fixed(row.traffic.ms, 7)} ms"),
    Column("exposed", 10, 1, lambda row, _: f"{format.fixed(row.traffic.exposed_ms, 7)} ms", True),
    Column("hidden", 9, 3, lambda row, _: format.percent(row.overlapped, 7)),
    Column("of step", 9, 1, lambda row, _: format.percent(row.of_step, 7), True),
    Column("a rank", 12, 2, lambda row, scale: _rate(row, scale)),
)
PLAIN = tuple(one for one in COLUMNS if one.rank == 1)
NARROW = tuple(one for one in PLAIN if one.head != "time")  # if not even the plain columns fit


MORE = {"time": "{}", "hidden": "{} hidden", "a rank": "{} a rank"}  # the same in words


def _sent(row: AxisTraffic, scale: Scale) -> str:
    """The sent bytes as text, in the column's unit; in a smaller unit if the value would be rounded to zero in the
    column's unit."""
    sent, unit, size = row.traffic.bytes, scale.unit, scale.bytes
    if 0 < sent < size / 20:
        unit, size = byte_unit(10 * sent)
    return f"{format.fixed(sent / size, 6)} {unit}"


def _rate(row: AxisTraffic, scale: Scale) -> str:
    rate = row.bytes_per_s
    return f"{format.fixed(None if rate is None else rate / scale.rate, 6)} {scale.rate_unit}/s"


class TrafficByAxis(Panel):
    """The panel with one row per axis that shows the axis's traffic. `detailed`: also show the bandwidth, the share of
    communication time that overlaps with computation, the number of ranks in the largest process group of the axis, and
    a chart of the exposed time over the newest steps."""

    TOPICS = frozenset({Topic.CURVES})
    TITLE = "Traffic"
    OPENS = "traffic"
    NATURAL = True
    HELP = (
        "One row for each axis with traffic. `sent` is all bytes that ranks send to other ranks in one step. "
        "Milliseconds are means over ranks. `of step` is the exposed time as a share of the step. In the bar, `▇` is "
        "exposed time, and `▒` is time that overlaps with computation; `hidden` is the overlapped share. `a rank` is "
        "the bytes that a rank sends divided by its time in collectives. That time includes waiting for other ranks, "
        "so the links are at least as fast. The curve is the exposed time of the newest steps."
    )

    def __init__(self, id: str, detailed: bool = False, selection: Selection | None = None) -> None:
        super().__init__(id)
        self._detailed, self._selection = detailed, selection

    def choice(self) -> object:
        return self._step

    @property
    def _step(self) -> int | None:
        return self._selection.step if self._selection else None

    def title(self, store: Store) -> str:
        return "Traffic · per step, by axis"

    def subtitle(self, store: Store) -> str:
        summary = summary_at(store, self._step)
        if summary is None or not summary.comm:
            return ""
        step, summaries = f"step {format.grouped(summary.step)}", store.state.summaries
        if not self._detailed:
            return step
        each = trend_steps(summaries[-1].step - summaries[0].step + 1, trend_room(self.content_size.width))
        return step if each == 1 else f"{step} · curve: max of {each} steps"

    def natural_height(self, store: Store) -> int:
        summary = summary_at(store, self._step)
        if not summary:
            return 2
        axes = len(axes_with_traffic(summary.comm))
        if not self._detailed:
            return axes + 1
        curve = TALL_CURVE if self.app.size.height >= TALL else 1
        return axes * (2 + curve) + 1 + (not expected(store))

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        summary, newest = summary_at(store, self._step), store.summary
        if not summary or not summary.comm:
            if no_traffic(store):
                return guide(store, width, height if self._detailed else 1, colours)
            what = f"step {format.grouped(self._step)} is not kept" if newest else "no step is done yet"
            return [StripLine().add(f"{format.MISSING} {what}", colours.faint)]
        rows = by_axis(summary, store.world)
        if not rows:
            return guide(store, width, height if self._detailed else 1, colours)
        chosen = _fitting(width) if self._detailed else PLAIN
        drawing = _Drawing(store, rows, chosen, width, colours, summary.step)
        lines = [drawing.head()]
        if self._detailed and not expected(store):
            lines.insert(0, StripLine().add(f"{format.MISSING} {why_none(store)}", colours.dim))
        further = (height - len(lines)) // len(rows) - 1 if self._detailed else 0
        rest = [one for one in COLUMNS if one not in chosen]
        more = further >= 2
        for row in rows:
            lines.append(drawing.row(row))
            if more:
                lines.append(drawing.more(row, rest))
            if further >= 1:
                lines += drawing.trend(row, min(TALL_CURVE, further - more))
        return lines


def _fitting(width: int) -> Sequence[Column]:
    """The columns that fit beside a bar in a panel of this width."""
    for least in sorted({one.rank for one in COLUMNS}, reverse=True):
        chosen = [one for one in COLUMNS if one.rank <= least]
        if NAME + sum(one.width for one in chosen) + 2 + BAR <= width:
            return chosen
    return NARROW


class _Drawing:
    """Draws the panel's rows for one step."""

    def __init__(
        self,
        store: Store,
        rows: list[AxisTraffic],
        chosen: Sequence[Column],
        width: int,
        colours: Palette,
        step: int,
    ) -> None:
        self.store, self.chosen, self.colours, self.step, self.width = store, chosen, colours, step, width
        unit, size = byte_unit(max(row.traffic.bytes for row in rows), "MB")
        rate_unit, rate = byte_unit(max((row.bytes_per_s or 0.0 for row in rows), default=0.0), "kB")
        self.scale = Scale(unit, size, rate_unit, rate)
        self.longest = max(row.traffic.ms for row in rows)
        self.room = max(0, width - NAME - sum(one.width for one in chosen) - 2)
        self.groups = groups(store)
        self.peak = max((row.traffic.exposed_ms for row in rows), default=0.0)

    def head(self) -> StripLine:
        names = "".join(one.head.rjust(one.width) for one in self.chosen)
        return StripLine().add(f"{'':{NAME}}{names}", self.colours.dim)

    def row(self, row: AxisTraffic) -> StripLine:
        colours = self.colours
        line = StripLine().add(row.axis[:NAME].ljust(NAME), colours.text)
        for one in self.chosen:
            style = colours.dim if one.exposed and not row.traffic.exposed_ms else colours.text
            line.add(one.text(row, self.scale).rjust(one.width), style)
        line.add("  ", style)
        solid, light = _bar(row.traffic, self.longest, self.room)
        return line.add("▇" * solid, colours.accent).add("▒" * light, colours.faint)

    def more(self, row: AxisTraffic, rest: Sequence[Column]) -> StripLine:
        """A line below the row of an axis: the values of the columns for which the row has no room (`rest`), and the
        number of ranks in the largest process group of the axis. Items for which the line has no room are omitted."""
        line = StripLine().pad_to(INDENT, self.colours.dim)
        values = [(one.head, one.text(row, self.scale).strip()) for one in rest]
        words = [MORE[head].format(value) for head, value in values if not value.startswith(format.MISSING)]
        group = self.groups.get(row.axis)
        if group and row.axis != "control":
            words.append(
                format.counted(group.ranks, "rank") + (f" on {group.hosts} nodes" if group.hosts > 1 else "")
            )
        for word in words:
            text = f" · {word}" if line.width > INDENT else word
            if line.width + len(text) <= self.width:
                line.add(text, self.colours.dim)
        return line

    def trend(self, row: AxisTraffic, height: int) -> list[StripLine]:
        """A chart of the exposed time in the last steps up to the shown step. The vertical axis starts at zero. Each
        value is drawn as a mark, not as a filled bar, because bars of similar height would merge into one block."""
        colours = self.colours
        room = trend_room(self.width)
        values = trend(self.store, row.axis, room, self.step)
        top = max((value for value in values if value is not None), default=0.0)
        lines = [StripLine().pad_to(INDENT, colours.dim) for _ in range(height)]
        for value in values:
            known = column(value / top if top else 0.0, height) if value is not None else [" "] * height
            first = next((at for at, glyph in enumerate(known) if glyph != " "), None)
            for at, line in enumerate(lines):
                if at == first:
                    line.add(known[at], colours.curve)
                else:
                    line.add(format.MISSING if first is None and at == height - 1 else " ", colours.faint)
        lines[0].pad_to(INDENT + room, colours.dim).add(f" most{format.fixed(top, 7)} ms", colours.dim)
        return lines


def trend_room(width: int) -> int:
    """The number of values that a trend curve can show in a panel that is `width` cells wide."""
    return max(1, width - INDENT - 15)


def _bar(traffic: Traffic, longest_ms: float, room: int) -> tuple[int, int]:
    """How many cells of an axis's bar show exposed time, and how many show overlapped time. The longest bar, which has
    `longest_ms`, is `room` cells wide."""
    if longest_ms <= 0:
        return 0, 0
    whole = min(room, round(traffic.ms / longest_ms * room))
    solid = min(whole, round(traffic.exposed_ms / longest_ms * room))
    return solid, whole - solid
