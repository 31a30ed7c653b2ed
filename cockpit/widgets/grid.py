"""The ranks: one cell each, coloured by how far it is from its peers, and an inspector of one of them."""

from functools import lru_cache
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding

from cockpit import format
from cockpit.actions import GRID, GRID_KEYS
from cockpit.lines import Line, bar
from cockpit.metrics import Metric, Reading, available, read
from cockpit.store import Store, Topic
from cockpit.theme import Palette
from cockpit.verdict import SLOW_RANK, Level, stalled
from cockpit.widgets.arrange import Coords, Plan, Row, Slot, axes_of, bands, plan, step_from
from cockpit.widgets.panel import Panel

WIDE_CELL = 19
INSPECTOR = 3
ROOMY = 24  # lines the grid may ask for
_SEVERITY = (Level.BAD, Level.WARN, Level.NOTE, Level.GOOD)


class RankGrid(Panel):
    """Any metric of every rank, grouped by any axis."""

    TOPICS = frozenset({Topic.RANKS, Topic.PULSE})
    TITLE = "Ranks"
    NATURAL = True
    BINDINGS: ClassVar[list[Binding]] = GRID_KEYS  # type: ignore[assignment]
    ACTIONS = GRID
    HELP = (
        "One cell a rank. The number is of the newest step that all have done; the colour says how far the "
        "rank's recent steps are from the median of its own pipeline stage: orange is worse, blue is better. "
        "`!` slow or stalled, `✗` lost, `·` no data. Where cells are shared, a cell shows the worst of its ranks."
    )

    def __init__(self) -> None:
        super().__init__("ranks")
        self.metric = "step"
        self.group: str | None = None
        self.selected: int | None = 0
        self._plan: Plan | None = None

    # -------------------------------------------------------------------------------- what was chosen

    def choice(self) -> object:
        return self.metric, self.group, self.selected

    def _metric(self, store: Store) -> Metric:
        metrics = available(store)
        return next((metric for metric in metrics if metric.key == self.metric), metrics[0])

    def _group(self, coords: dict[int, Coords]) -> str | None:
        axes = axes_of(coords)
        return self.group if self.group in axes else next(iter(axes), None)

    def action_metric(self, step: int = 1) -> None:
        with self._store.lock:
            keys = [metric.key for metric in available(self._store)]
        at = keys.index(self.metric) if self.metric in keys else 0
        self.metric = keys[(at + step) % len(keys)]
        self.again()

    def action_regroup(self) -> None:
        with self._store.lock:
            coords = _coords(self._store)
        axes = axes_of(coords)
        if axes:
            current = self._group(coords)
            self.group = axes[(axes.index(current) + 1) % len(axes)] if current in axes else axes[0]
        self.again()

    def action_cursor(self, dx: int, dy: int) -> None:
        if self._plan:
            self.selected = step_from(self._plan.grid, self.selected, dx, dy)
            self.again()

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        if at and self._plan and (slot := self._plan.at(at.x, at.y, 1 if self._plan.columns else 0)):
            self.selected = slot[0]
            self.again()

    # ---------------------------------------------------------------------------------------- drawing

    def title(self, store: Store) -> str:
        group = store.once(("group", self.group), (Topic.GRID,), lambda: self._group(_coords(store)))
        by = f" · by {group}" if group else ""
        return f"Ranks · {self._metric(store).title}{by}"

    def subtitle(self, store: Store) -> str:
        return f"{store.coverage().strip()} reporting"

    def natural_height(self, store: Store) -> int:
        return len(self._planned(store, max(1, self.content_size.width), ROOMY).rows) + 6

    def _planned(self, store: Store, width: int, height: int) -> Plan:
        group = store.once(("group", self.group), (Topic.GRID,), lambda: self._group(_coords(store)))

        def compute() -> Plan:
            found, columns = bands(_coords(store), group)
            return plan(found, columns, width, height, WIDE_CELL)

        return store.once(("plan", group, width, height), (Topic.GRID,), compute)

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[Line]:
        metric = self._metric(store)
        readings = read(store, metric)
        levels = _levels(store, metric, readings)
        # The inspector gives way where the ranks would have to share cells, or lose their numbers.
        plans = [(foot, self._planned(store, width, height - foot)) for foot in (1 + INSPECTOR, 2)]
        foot, self._plan = min(plans, key=lambda choice: (choice[1].shared, not choice[1].wide))
        drawing = _Drawing(metric, readings, levels, colours, self.selected, len(str(store.world - 1)))
        lines = drawing.rows(self._plan)
        gap = max(0, min(1, height - foot - len(lines)))
        lines += [Line()] * gap
        lines.append(_legend(metric, levels, store.world, self._plan, colours))
        lines += inspector(store, metric, readings, self.selected, colours)[: foot - 1]
        return lines


def _coords(store: Store) -> dict[int, Coords]:
    return {rank: hello.coords for rank, hello in store.state.hellos.items()}


def _levels(store: Store, metric: Metric, readings: dict[int, Reading]) -> dict[int, Level]:
    """What to think of each rank, beside its number."""
    stuck = set(stalled(store))
    levels = {}
    for rank, reading in readings.items():
        gone = store.state.gone.get(rank)
        if gone:
            levels[rank] = Level.NOTE if gone.clean else Level.BAD
        elif rank in stuck or (metric.worse and reading.apart * metric.worse >= SLOW_RANK):
            levels[rank] = Level.WARN
        else:
            levels[rank] = Level.NOTE if reading.value is None else Level.GOOD
    return levels


class _Drawing:
    """One frame of the grid."""

    def __init__(
        self,
        metric: Metric,
        readings: dict[int, Reading],
        levels: dict[int, Level],
        colours: Palette,
        selected: int | None,
        digits: int,
    ) -> None:
        self.metric, self.readings, self.levels, self.colours = metric, readings, levels, colours
        self.selected, self.digits = selected, digits
        self.top = max((r.value for r in readings.values() if r.value is not None), default=0.0)

    def rows(self, how: Plan) -> list[Line]:
        lines = []
        if how.columns:
            head = Line().pad_to(how.label, self.colours.faint)
            for name in how.columns:
                head.add(f"{'':{self.digits + 2}}{name}".ljust(how.cell)[: how.cell], self.colours.dim)
            lines.append(head)
        for row in how.rows:
            line = Line().add(row.label, self.colours.text)
            if row.sub:
                line.pad_to(how.label - LABEL_RIGHT - len(row.sub), self.colours.dim).add(
                    row.sub, self.colours.dim
                )
            line.pad_to(how.label, self.colours.dim)
            self._cells(line, how, row)
            lines.append(line)
        return lines

    def _cells(self, line: Line, how: Plan, row: Row) -> None:
        if how.wide:
            for slot in row.top:
                if slot:
                    self._wide(line, slot[0], how.cell)
                else:
                    line.add(" " * how.cell, self.colours.dim)
        elif row.bottom is None:
            for slot in row.top:
                rank = self._worst(slot)
                glyph, style = self._tile(rank)
                text = glyph * max(1, how.cell - 1)
                line.add(text, self._cursor(slot, style)).add(" " * (how.cell - len(text)), self.colours.dim)
        else:
            for i, slot in enumerate(row.top):
                self._half(line, slot, row.bottom[i] if i < len(row.bottom) else ())

    def _wide(self, line: Line, rank: int, width: int) -> None:
        """`r3 ▇▇▇▇  412 !`"""
        reading, level, colours = self.readings[rank], self.levels[rank], self.colours
        chosen = rank == self.selected
        tag = colours.cursor if chosen else colours.dim
        line.add(f"r{rank}".rjust(self.digits + 1), tag).add(" ", colours.dim)
        bar_width = width - self.digits - 12
        shade = colours.faint if level in (Level.BAD, Level.NOTE) else self._shade(reading)
        share = reading.value / self.top if reading.value is not None and self.top else 0.0
        line.add(bar(share, bar_width).replace("█", "▇") if share else MISSING_BAR[:bar_width], shade)
        line.pad_to(line.width, shade)
        number = colours.level[level] if level in (Level.WARN, Level.BAD) else colours.text
        line.add(format.fixed(reading.value, 6, self.metric.digits), number)
        glyph = level.value if level in (Level.WARN, Level.BAD) else " "
        line.add(f" {glyph}  ", colours.level[level])

    def _shade(self, reading: Reading) -> Style:
        if not self.metric.worse:
            share = reading.value / self.top if reading.value is not None and self.top else 0.0
            return self.colours.ramp[min(len(self.colours.ramp) - 1, int(share * len(self.colours.ramp)))]
        return self.colours.apart[Palette.bin(reading.apart * self.metric.worse)]

    def _worst(self, slot: Slot) -> int:
        worse = self.metric.worse or 1
        return min(
            slot, key=lambda rank: (_SEVERITY.index(self.levels[rank]), -self.readings[rank].apart * worse)
        )

    def _tile(self, rank: int) -> tuple[str, Style]:
        level = self.levels[rank]
        if level is Level.GOOD:
            return "█", self._shade(self.readings[rank])
        return level.value, self.colours.level[level]

    def _cursor(self, slot: Slot, style: Style) -> Style:
        return self.colours.cursor if self.selected in slot else style

    def _half(self, line: Line, top: Slot, bottom: Slot) -> None:
        above, below = self._tile(self._worst(top)), self._tile(self._worst(bottom)) if bottom else None
        alarm = next((t for t in (above, below) if t and t[0] not in "█·"), None)
        if self.selected is not None and (self.selected in top or self.selected in bottom):
            line.add(alarm[0] if alarm else "◆", self.colours.cursor)
        elif alarm:
            line.add(*alarm)  # a whole cell for what must be seen
        elif below is None:
            line.add("▀", above[1])
        else:
            line.add("▀", _halves(above[1], below[1]))


MISSING_BAR = "·" * 64
LABEL_RIGHT = 2


@lru_cache(maxsize=4096)
def _halves(top: Style, bottom: Style) -> Style:
    return Style(color=top.color, bgcolor=bottom.color)


def _legend(metric: Metric, levels: dict[int, Level], world: int, how: Plan, colours: Palette) -> Line:
    line = Line()
    if metric.worse:
        line.add("better " if how.label else "", colours.dim)
        for style in colours.apart:
            line.add("▇", style)
        line.add(" worse than its stage", colours.dim)
    else:
        line.add("0 ", colours.dim)
        for style in colours.ramp:
            line.add("▇", style)
        line.add(" most", colours.dim)
    line.add(f"  {metric.unit}".rstrip(), colours.dim).add("   ", colours.dim)
    unseen = world - len(levels)
    for level in (Level.GOOD, Level.WARN, Level.BAD, Level.NOTE):
        count = sum(found is level for found in levels.values()) + (unseen if level is Level.NOTE else 0)
        if count or level is Level.GOOD:
            line.add(f"{level.value} {count}  ", colours.level[level] if count else colours.faint)
    if how.shared > 1:
        line.add(f"a cell is the worst of {how.shared}", colours.dim)
    return line


def inspector(
    store: Store, metric: Metric, readings: dict[int, Reading], rank: int | None, colours: Palette
) -> list[Line]:
    """Three lines on one rank: who it is, its last step, what it is doing."""
    if rank is None or rank not in store.state.hellos:
        return [Line().add("arrows choose a rank", colours.faint)]
    hello, step, pulse = store.state.hellos[rank], store.state.steps.get(rank), store.state.pulses.get(rank)
    who = Line().add(f"r{rank} ", colours.cursor).add(f" {format.coords(hello.coords)}", colours.text)
    who.add(f" · {hello.host} · {hello.device} · pid {hello.pid}", colours.dim)
    reading = readings[rank]
    against = f"{reading.apart:+.0%} against its stage".replace("-0%", "+0%")
    numbers = Line().add(f"{format.fixed(reading.value, 5, metric.digits)} {metric.unit}", colours.strong)
    numbers.add(f" {against}", colours.text)
    if step:
        for name, spent in step.phases.items():
            numbers.add(f" · {name} ", colours.dim).add(format.fixed(spent, 5, 0).strip(), colours.text)
    gone = store.state.gone.get(rank)
    if gone:
        doing = Line().add("gone" if gone.clean else f"{Level.BAD.value} lost", colours.level[Level.BAD])
        doing.add(f" {gone.text}", colours.dim)
    elif pulse:
        doing = Line().add("in ", colours.dim).add(pulse.doing or format.MISSING, colours.text)
        if pulse.since_ms >= 1000:
            doing.add(f" for {format.age(pulse.since_ms / 1000)}", colours.dim)
    else:
        doing = Line().add(f"{format.MISSING} no pulse yet", colours.faint)
    return [who, numbers, doing]
