"""Panel with all data about one rank: each number beside the median of the rank's peers, and the reason why the rank is
slow."""

from bisect import bisect_left, bisect_right
from typing import ClassVar

from textual.binding import Binding

from agents.protocol import Vitals
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import LOST
from cockpit.data.diagnosis.statement import Level
from cockpit.data.history.metric_table import MEMORY, PHASE, WAITING
from cockpit.data.metrics import OWN_TIME, RECENT_STEPS, STEP_TIME, GiB
from cockpit.data.ranks.rank_facts import Fact, alerts_of, facts, no_record, why
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine, named
from cockpit.tui.drawing.theme import DEVIATION_EDGES, Palette
from cockpit.tui.keys.screen_bindings import RANK, RANK_KEYS
from cockpit.tui.session import Selection
from cockpit.tui.widgets.ranks import view
from cockpit.tui.widgets.ranks.base import RankPanel

NAME = 15  # columns for the name of a number; a wide panel has as many more as the longest name needs
VALUE = 8  # columns for a number
UNIT = 6
OFF = 8  # columns for the deviation
BAR = 6  # minimum length of a bar; a shorter one is not readable
DIFFERS = 0.1  # a number that cannot be better or worse is highlighted from this deviation on
NEUTRAL = bisect_right(DEVIATION_EDGES, 0.0)  # bin of a number that equals that of the peers
SPARK = "▁▂▃▄▅▆▇█"
LINES = (OWN_TIME.key, WAITING.key, STEP_TIME.key, "bubble", "tokens", "rate", "mfu", "dropped", MEMORY.key)
SIGNS = ("device_memory", "power", "temperature", "clock", "device")
TIMES = (OWN_TIME.key, WAITING.key, STEP_TIME.key)
NAMES = {WAITING.key: "waiting", MEMORY.key: "peak memory", f"{PHASE}expert placement": "placement"}


class RankDetails(RankPanel):
    """The panel with the details of the selected rank."""

    TOPICS = frozenset({Topic.GRID, Topic.RANKS, Topic.PULSE, Topic.EVENTS})
    TITLE = "Rank"
    BINDINGS: ClassVar[list[Binding]] = RANK_KEYS  # type: ignore[assignment]
    ACTIONS = RANK
    EVERY = 4
    HELP = (
        "All that is known about the selected rank. The second line says whether the rank is slow, and why. Beside "
        "each number is the median of the rank's peers, which are the ranks of its pipeline stage. A bar is the rank's "
        "time, and `┃` in it is the time of the peers. Own time is the step time minus the time in which the rank "
        "waited for others. Times are medians of the newest 8 steps; if a step is selected, all numbers are those of "
        "that step."
    )

    def __init__(self, selection: Selection) -> None:
        super().__init__("rank", selection)
        self._top = 0  # number of lines above the visible part
        self._hidden = 0  # number of lines that do not fit

    def choice(self) -> object:
        return super().choice(), self._top, self._hidden

    def subtitle(self, store: Store) -> str:
        return f"↑ ↓ {self._hidden} more line{'s' * (self._hidden != 1)}" if self._hidden else ""

    def title(self, store: Store) -> str:
        rank = self.selection.rank
        metric = view.metric_of(store, self.selection)
        outside = rank is not None and not view.filtered(store, self.selection, [rank])
        name = "Rank" if rank is None else f"Rank {rank}" + " · outside the filter" * outside
        return name + view.step_text(store, self.selection, metric)

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        rank = self.selection.rank
        if rank is None or rank not in store.state.hellos:
            return [StripLine().add("w selects the worst rank, arrow keys any other", colours.faint)]
        draw = _Drawing(store, rank, self.selection, width, colours)
        blocks = [draw.who(), draw.why(), draw.doing(), draw.times(), draw.history(), draw.alerts()]
        blocks += [draw.device(), draw.others(), draw.records()]
        blocks = [block for block in blocks if block]
        spare = height - sum(map(len, blocks))
        lines: list[StripLine] = []
        for number, block in enumerate(blocks):
            if number > 1 and spare > 0:
                lines.append(StripLine())
                spare -= 1
            lines += block
        hidden = max(0, len(lines) - height)
        self._top = min(self._top, hidden)
        if hidden != self._hidden:
            self._hidden = hidden
            self.call_after_refresh(self.redraw)  # the subtitle says how many lines are hidden
        return lines[self._top :]

    def action_scroll(self, by: int) -> None:
        self._top = max(0, min(self._hidden, self._top + by))
        self.redraw()

    def action_other(self, by: int) -> None:
        """Show the previous or the next rank."""
        with self._store.lock:
            ranks = view.filtered(self._store, self.selection, sorted(self._store.state.hellos))
        if ranks:
            at = bisect_left(ranks, self.selection.rank if self.selection.rank is not None else -by)
            self.selection.rank = ranks[(at + by) % len(ranks)]
            self._top = 0
            self.changed()


class _Drawing:
    """Draws the panel's groups of lines: one method for each, such as the rank's coordinates, its diagnosis, its
    current operation, and its times."""

    def __init__(self, store: Store, rank: int, selection: Selection, width: int, colours: Palette) -> None:
        self.store, self.rank, self.selection = store, rank, selection
        self.width, self.colours = width, colours
        self.hello = store.state.hellos[rank]
        self.facts = facts(store, rank, selection.step)
        self.gone = store.state.gone.get(rank)
        spare = width - NAME - 2 * VALUE - UNIT - OFF - BAR - 2
        shown = (fact for key, fact in self.facts.items() if key.startswith(PHASE) or key in LINES + SIGNS)
        longest = max((len(self._name(fact)) + 1 for fact in shown), default=0)
        self.name = NAME + max(0, min(spare, longest - NAME))

    def who(self) -> list[StripLine]:
        hello, colours = self.hello, self.colours
        line = (
            StripLine()
            .add(f"r{self.rank}", colours.cursor)
            .add(f" {format.coords(hello.coords)}", colours.text)
        )
        return self._joined(
            line,
            [
                text
                for text in (format.clean(hello.host), format.clean(hello.device), f"pid {hello.pid}")
                if text
            ],
            " · ",
        )

    def why(self) -> list[StripLine]:
        found = why(self.store, self.rank, self.selection.step)
        style = self.colours.level[found.level]
        line = StripLine().add(f"{found.level.value} ", style)
        first, *rest = found.parts
        strong = style if found.level in (Level.WARN, Level.BAD) else self.colours.text
        start, *more = format.wrapped(first, max(1, self.width - 2))
        lines = [line.add(start, strong), *(StripLine().add(f"  {part}", strong) for part in more)]
        return lines[:-1] + self._joined(lines[-1], rest, " · ", indent=2, plain=True)

    def doing(self) -> list[StripLine]:
        colours, pulse = self.colours, self.store.state.pulses.get(self.rank)
        line = StripLine().add("now ".ljust(6), colours.dim)
        if self.gone:
            level = Level.NOTE if self.gone.clean else Level.BAD
            text = "done" if self.gone.clean else f"{level.value} {LOST[self.gone.process]}"
            return [line.add(text, colours.level[level])]
        if pulse is None:
            return [line.add(f"{format.MISSING} {no_record(self.store, 'pulse')}", colours.faint)]
        into, operation = format.operation_text(pulse.doing)
        line.add(into, colours.dim).add(operation, colours.text)
        if pulse.since_ms >= 1000:
            line.add(f" for {format.age(pulse.since_ms / 1000)}", colours.dim)
        return [line]

    # ------------------------------------------------------------------------------------------ numbers

    def times(self) -> list[StripLine]:
        known = [self.facts[key] for key in TIMES[:2] if key in self.facts]
        phases = [fact for key, fact in self.facts.items() if key.startswith(PHASE)]
        if STEP_TIME.key in self.facts:
            known.append(self.facts[STEP_TIME.key])
        if not known and not phases:
            return []
        longest = max(max(fact.value, fact.peers or 0.0) for fact in known + phases)
        return [self._heading(), *(self._line(fact, longest) for fact in [*phases, *known])]

    def others(self) -> list[StripLine]:
        return [self._line(self.facts[key]) for key in LINES if key in self.facts and key not in TIMES]

    def device(self) -> list[StripLine]:
        vitals = self.store.state.vitals.get(self.rank)
        if vitals is None:
            return []
        lines = [self._line(self.facts[key], None, _limit(key, vitals)) for key in SIGNS if key in self.facts]
        if vitals.throttle is not None:
            level = Level.WARN if vitals.throttle else Level.GOOD
            text = ", ".join(map(format.clean, vitals.throttle)) if vitals.throttle else "no".rjust(VALUE)
            line = StripLine().add("throttled".ljust(self.name), self.colours.dim)
            glyph = f"{level.value} " if vitals.throttle else ""
            style = self.colours.level[level] if vitals.throttle else self.colours.text
            lines.append(line.add(f"{glyph}{text}", style))
        return lines

    def _heading(self) -> StripLine:
        count = sum(1 for fact in self.facts.values() if fact.peers is not None)
        line = StripLine().add("".ljust(self.name) + "rank".rjust(VALUE) + "".ljust(UNIT), self.colours.dim)
        if count:
            line.add("peers".rjust(VALUE), self.colours.dim)
        return line

    def _line(self, fact: Fact, longest: float | None = None, limit: str = "") -> StripLine:
        """The line for one metric: its name, value and unit, the median of the peers, and the deviation from this
        median. If the metric is a time, the line also has a bar."""
        metric, colours = fact.metric, self.colours
        bin = self._bin(fact)
        line = StripLine().add(named(self._name(fact), self.name), colours.dim)
        line.add(
            format.fixed(fact.value, VALUE, metric.digits),
            colours.strong if bin > NEUTRAL + 1 else colours.text,
        )
        line.add(f" {metric.unit}".ljust(UNIT), colours.dim)
        peers = format.fixed(fact.peers, VALUE, metric.digits)
        line.add(peers, colours.dim)
        # a percentage of a value that is shown as 0 would look wrong
        known = fact.deviation is not None and (fact.deviation == 0 or peers.strip(" 0."))
        off = format.excess(fact.deviation) if known and fact.deviation is not None else ""
        plain = colours.text if abs(fact.deviation or 0.0) >= DIFFERS else colours.dim
        line.add(off.rjust(OFF) + " ", colours.deviation_text[bin] if bin != NEUTRAL else plain)
        if longest and self.width - line.width > BAR:
            self._bar(line, fact, longest)
        return line.add(limit if line.width + len(limit) <= self.width else "", colours.dim)

    @staticmethod
    def _name(fact: Fact) -> str:
        key = fact.metric.key
        title = key.removeprefix(PHASE) if key.startswith(PHASE) else fact.metric.title
        return format.clean(NAMES.get(key, title))

    def _bin(self, fact: Fact) -> int:
        towards = fact.metric.worse
        return bisect_right(DEVIATION_EDGES, (fact.deviation or 0.0) * towards) if towards else NEUTRAL

    def _bar(self, line: StripLine, fact: Fact, longest: float) -> None:
        room = self.width - line.width - 1
        filled = round(max(0.0, fact.value) / longest * room)
        mark = None if fact.peers is None else min(room - 1, max(0, round(fact.peers / longest * room)))
        bin = self._bin(fact)
        for x in range(room):
            if x == mark:
                line.add("┃", self.colours.text)
            else:
                line.add("▇" if x < filled else " ", self.colours.deviation[bin])

    # ------------------------------------------------------------------------------------------ history

    def history(self) -> list[StripLine]:
        metric = view.metric_of(self.store, self.selection)
        series = self.store.rank_history.series(metric.key, self.rank)
        if len(series) < 2:
            return []
        room = max(8, self.width - 1)
        shown = series[-room:]
        values = [value for _, value in shown]
        low, high = min(values), max(values)
        span = high - low or 1.0
        line = StripLine()
        for step, value in shown:
            glyph = SPARK[min(7, int((value - low) / span * 8))] if high > low else SPARK[3]
            line.add(glyph, self.colours.mark if step == self.selection.step else self.colours.curve)
        numbers = f"{low:.{metric.digits}f} to {high:.{metric.digits}f} {metric.unit}".rstrip()
        steps = f"steps {format.grouped(shown[0][0])} to {format.grouped(shown[-1][0])}"
        head = (
            StripLine()
            .add(f"{metric.title} ", self.colours.text)
            .add(f"{numbers} · {steps}", self.colours.dim)
        )
        return [head, line]

    # ------------------------------------------------------------------------------------------- alerts

    def alerts(self) -> list[StripLine]:
        lines = []
        for alert in alerts_of(self.store, self.rank):
            level = Level.BAD if alert.level == "error" else Level.WARN
            line = StripLine().add(f"{level.value} {format.clean(alert.name)}", self.colours.level[level])
            if alert.since_step is not None:
                line.add(f" since step {format.grouped(alert.since_step)}", self.colours.text)
            lines += self._joined(line, format.words(format.clean(alert.text)), " ", indent=2, plain=True)
        return lines

    def records(self) -> list[StripLine]:
        """The newest step that the rank reported, and the number of records that its agent dropped."""
        step = self.store.state.steps.get(self.rank)
        if step is None:
            return [StripLine().add(f"{format.MISSING} {no_record(self.store)}", self.colours.faint)]
        line = (
            StripLine().add("last step ", self.colours.dim).add(format.grouped(step.step), self.colours.text)
        )
        if self.selection.step is not None:
            parts = [f"numbers of step {format.grouped(self.selection.step)}"]
        else:
            parts = [f"times are medians of {RECENT_STEPS} steps"]
        lost = f"{format.counted(step.lost_records, 'record')} lost"
        parts.append(f"{Level.WARN.value} {lost}" if step.lost_records else lost)
        return self._joined(line, parts, " · ")

    def _joined(
        self, line: StripLine, parts: list[str], glue: str, indent: int = 0, plain: bool = False
    ) -> list[StripLine]:
        """`line` with `parts` appended, wrapped at the width of the panel. `plain`: draw the parts in the normal text
        colour, not dimmed."""
        lines = [line]
        style = self.colours.text if plain else self.colours.dim
        for part in parts:
            text = part if lines[-1].width <= indent else glue + part
            if lines[-1].width + len(text) > self.width and lines[-1].width > indent:
                lines.append(StripLine().add(" " * indent, self.colours.text))
                text = part
            lines[-1].add(text, style)
        return lines


def _limit(key: str, vitals: Vitals) -> str:
    """The limit of a vital sign as text: the size of the device memory, or the power limit; "" for other vital
    signs."""
    if key == "device_memory" and vitals.device_memory_total:
        return f"of {vitals.device_memory_total / GiB:.0f} GiB"
    if key == "power" and vitals.power_limit_w:
        return f"of {vitals.power_limit_w:.0f} W"
    return ""
