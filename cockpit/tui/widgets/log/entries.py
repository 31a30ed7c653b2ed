"""Panel with the log of the run: a list of entries with filters, and the details of the entry at the cursor."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.style import Style
from textual.binding import Binding

from agents.protocol import SAMPLE, CommandState, TrialState, Value
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.log.log_view import LogFilter, LogGroup, groups
from cockpit.data.log.outcomes import brought, brought_text
from cockpit.data.log.run_log import Kind, LogEntry, log_entries
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine, rule
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.general_bindings import LIST
from cockpit.tui.keys.screen_bindings import LOG, LOG_KEYS
from cockpit.tui.widgets.board.outcomes import OUTCOME, VERDICT
from cockpit.tui.widgets.log.listing import ListPanel, wrap

Spell = Callable[[float], str]

LEVELS = {"info": Level.NOTE, "warning": Level.WARN, "error": Level.BAD}
KIND_LEVELS = {Kind.CHECKPOINT: Level.GOOD, Kind.RESUME: Level.NOTE, Kind.ENDED: Level.GOOD}
STEP = 8  # columns
KIND = 8
DAY_S = 20 * 3600.0  # a log that spans more than this shows dates
CLOCK, DATE = "%H:%M:%S", "%m-%d %H:%M:%S"

# The screen that shows the subject of an alert; for all other alerts, the curves.
SHOWN_BY = {
    **dict.fromkeys(
        ("straggler", "throttle", "memory", "stall", "lost", "silent", "unheard", "absent"), "ranks"
    ),
    **dict.fromkeys(("dead_experts", "collapse", "drops"), "experts"),
}


class LogPanel(ListPanel[LogGroup]):
    """The panel with the entries of the log, newest last."""

    TOPICS = frozenset({Topic.EVENTS, Topic.BOARD, Topic.CURVES})
    TITLE = "Log"
    BINDINGS: ClassVar[list[Binding]] = LOG_KEYS
    ACTIONS = (*LOG, *LIST)
    EMPTY = "no events yet"
    DETAILS = True
    EVERY = 2
    HELP = (
        "Events, changes, trials, alerts and checkpoints, oldest first. The list follows the newest entry while the "
        "cursor is on it. If the cursor is further up, the list does not scroll, and the lower border says how many "
        "entries are newer. `×12` is an entry that was repeated; `~` is a step estimated from the time of an entry "
        "that names none. An alert shows how long it lasted, or `active`. Below the list are all facts of the entry at "
        "the cursor; for an applied change, also its measured effect beside the predicted one. enter opens the screen "
        "that shows the entry, at its step."
    )

    def __init__(self) -> None:
        super().__init__("log")
        self.only = LogFilter()
        self._dated = False

    # --------------------------------------------------------------------------------------- items

    def items(self, store: Store) -> Sequence[LogGroup]:
        entries = log_entries(store)
        self._dated = bool(entries) and abs(entries[-1].time_s - entries[0].time_s) > DAY_S
        return store.once(
            "log groups", (Topic.BOARD, Topic.EVENTS), lambda: groups(entries, self.only), self.only
        )

    def key_of(self, item: LogGroup) -> object:
        return item.first.key

    def place_of(self, key: object, items: Sequence[LogGroup]) -> int | None:
        found = super().place_of(key, items)
        if found is None:  # the first entries of the group were dropped, or a filter formed other groups
            inside = (
                at for at in range(len(items) - 1, -1, -1) if any(one.key == key for one in items[at].entries)
            )
            found = next(inside, None)
        return found

    def changed(self) -> None:
        self.only = replace(self.only, text=self.text)

    def choice(self) -> object:
        return (super().choice(), self.only)

    def title(self, store: Store) -> str:
        shown = LogFilter(self.only.kind, self.only.level)
        return f"Log · {shown}" if str(shown) else "Log"

    def subtitle(self, store: Store) -> str:
        count = len(log_entries(store))
        total = f"{format.grouped(count)} {'entry' if count == 1 else 'entries'}"
        if 0 < len(self._listed) < count and not self.text and not (self.only.kind or self.only.level):
            total += f" in {format.counted(len(self._listed), 'line')}"
        return f"{self.position()} · {total}" if self.position() else total

    def empty_text(self, store: Store) -> str:
        if self.only.kind or self.only.level:
            keys = " and ".join((["v"] if self.only.kind else []) + (["e"] if self.only.level else []))
            return f"no entries: {self.only} · {keys} {'show' if ' and ' in keys else 'shows'} others"
        return super().empty_text(store)

    # ------------------------------------------------------------------------------------- drawing

    def columns(self, item: LogGroup, items: Sequence[LogGroup], width: int, colours: Palette) -> StripLine:
        entry = item.shown
        line = StripLine().add(f"{self._time(entry.time_s)} ", colours.dim)
        if width >= 60:
            step = format.MISSING if entry.step is None else format.grouped(entry.step)
            step = f"~{step}" if entry.estimated and entry.step is not None else step
            line.add(f"{step:>{STEP}} ", colours.dim)
        level = level_of(item)
        line.add(f"{level.value} ", colours.faint if item.end else colours.level[level])
        if width >= 60:
            line.add(
                f"{entry.kind.value:<{KIND}}", colours.dim if entry.kind is Kind.EVENT else colours.accent
            )
        return line

    def parts(self, item: LogGroup, colours: Palette) -> list[tuple[str, Style]]:
        entry = item.shown
        over = entry.kind is Kind.ALERT and item.end is not None
        parts = [(f"×{item.count} ", colours.accent)] if item.count > 1 else []
        if entry.subject:
            parts.append((f"{format.clean(entry.subject[0])} ", colours.dim))
        if entry.kind is Kind.ALERT:
            lasted = item.lasted_s
            state = "active" if lasted is None else f"for {format.age(lasted)}"
            parts.append((state, colours.level[level_of(item)] if lasted is None else colours.dim))
            parts.append((" · ", colours.faint))
        parts.append((entry.text, colours.dim if over or entry.kind is Kind.ENDED else colours.text))
        if entry.source:
            parts.append((f" · {entry.source}", colours.faint))
        return parts

    def details(
        self, item: LogGroup, store: Store, width: int, height: int, colours: Palette
    ) -> list[StripLine]:
        entry = item.shown
        heading = f"{entry.kind.value} · {self._time(entry.time_s, dated=True)}"
        lines = [rule(heading, width, colours.text, colours.line)]
        rows = list(_rows(item, store, self._time))
        label_width = max((len(label) for label, _ in rows), default=0) + 2
        lines += [
            StripLine().add("  ", colours.text).extend(line)
            for text in entry.lines or (entry.text,)
            for line in _wrapped(text, width - 2, colours)
        ]
        # Short facts share a line if it is wide enough; the rest of the text has its own line.
        for label, text in rows:
            first, *more = _wrapped(text, width - 2 - label_width, colours)
            lines.append(StripLine().add(f"  {label:<{label_width}}", colours.dim).extend(first))
            lines += [StripLine().add(" " * (2 + label_width), colours.dim).extend(line) for line in more]
        if len(lines) > height > 0:
            hidden = len(lines) - height + 1
            lines = [
                *lines[: height - 1],
                StripLine().add(f"  … {hidden} more lines · z shows them", colours.faint),
            ]
        return lines

    def _time(self, time_s: float, dated: bool = False) -> str:
        return clock(time_s, dated or self._dated)

    # ------------------------------------------------------------------------------------- actions

    def action_kind(self, by: int) -> None:
        self.only = self.only.next_kind(by)
        self.redraw()

    def action_level(self) -> None:
        self.only = self.only.next_level()
        self.redraw()

    async def action_jump(self) -> None:
        group = self.chosen
        if group is None:
            return
        entry = group.shown
        if entry.step is None:
            self.app.notify("this entry names no step, and none is known for its time", markup=False)
            return
        await self.run_action(f"app.go({entry.step}, {entry.rank}, '{screen_of(entry)}')")


def screen_of(entry: LogEntry) -> str:
    """The name of the screen that shows the subject of an entry."""
    return SHOWN_BY.get(entry.subject[0], "curves") if entry.subject else "curves"


def level_of(group: LogGroup) -> Level:
    """The severity level that determines the glyph of a group of log entries that the list shows as one. For a change
    or a trial, this is the level of its outcome; for other groups, the worst level of an entry, unless that is info and
    `KIND_LEVELS` gives another level for the kind of entry."""
    entry = group.shown
    if entry.command:
        return OUTCOME[entry.command.state]
    if entry.trial:
        return VERDICT.get(entry.trial.state, Level.NOTE)
    if group.level == "info" and entry.kind in KIND_LEVELS:
        return KIND_LEVELS[entry.kind]
    return LEVELS.get(group.level, Level.NOTE)


def clock(time_s: float, dated: bool) -> str:
    """A time in the log as text; `·` for a time that cannot be converted to a date."""
    try:
        return time.strftime(DATE if dated else CLOCK, time.localtime(time_s))
    except (OverflowError, ValueError, OSError):
        return f"{format.MISSING:>{14 if dated else 8}}"


def _wrapped(text: str, width: int, colours: Palette) -> list[StripLine]:
    return wrap([(text, colours.text)], max(8, width))


def _rows(group: LogGroup, store: Store, spell: Spell) -> Iterator[tuple[str, str]]:
    """The details of a log entry, such as its step, source and duration, as (label, text) pairs."""
    entry = group.shown
    if group.count > 1:
        yield "repeated", f"×{group.count}, {spell(group.first.time_s)} to {spell(group.entries[-1].time_s)}"
    if entry.kind is Kind.ALERT:
        yield "lasted", _lasted(group, store, spell)
    if entry.step is not None:
        how = " (estimated from the time of the entry)" if entry.estimated else ""
        yield "step", f"{format.grouped(entry.step)}{how}"
    if entry.command:
        yield from _command_rows(entry.command, store)
    if entry.trial:
        yield from _trial_rows(entry.trial)
    if entry.source and not (entry.command or entry.trial):
        yield "source", entry.source
    shown = {name: value for name, value in entry.facts.items() if name not in ("step", SAMPLE)}
    facts = [f"{format.clean(name)} {_fact(value)}" for name, value in shown.items()]
    if facts:
        yield "facts", " · ".join(facts)


def _lasted(group: LogGroup, store: Store, spell: Spell) -> str:
    since = spell(group.shown.time_s)
    if group.end and group.lasted_s is not None:
        return f"{format.age(group.lasted_s)}: {since} to {spell(group.end.time_s)}"
    newest = store.summary
    age = newest.time_s - group.shown.time_s if newest else 0.0
    return f"active since {since}" + (f", {format.age(age)} so far" if age > 0 else "")


def _command_rows(command: CommandState, store: Store) -> Iterator[tuple[str, str]]:
    """Details of a change that its log entry does not contain: effect, author, failed ranks and id."""
    if command.state == "applied":
        found = brought(store.state, command)
        for number, one in enumerate(found):
            yield "" if number else "effect", f"{brought_text(one)} · {one.source}"
        if not found:
            yield "effect", f"{format.MISSING} too few steps before or after it are known"
    if command.who:
        yield "by", format.clean(command.who)
    if command.state == "applied" and command.failed:
        yield "ranks", f"{command.acks}/{command.world} have applied it, {command.failed} failed"
    yield "id", format.clean(command.id)


def _trial_rows(trial: TrialState) -> Iterator[tuple[str, str]]:
    if trial.who:
        yield "by", format.clean(trial.who)
    if trial.reason:
        yield "reason", format.clean(trial.reason)
    for name, steps_ms in (("before", trial.before_ms), ("after", trial.after_ms)):
        if steps_ms is not None:
            yield (
                name,
                f"{format.duration_ms(steps_ms).strip()} a step, over {format.counted(trial.steps, 'step')}",
            )
    if trial.loss_before is not None and trial.loss_after is not None:
        yield "loss", f"{trial.loss_before:.4f} → {trial.loss_after:.4f}"
    yield "id", format.clean(trial.id)


def _fact(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else format.knob(value)
