"""The log of a run: entries for events, knob changes, trials, alerts and checkpoints. Also the marks on the curves, at
the steps at which a knob change was applied and at the steps that the user marked."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from agents.protocol import (
    ALERT,
    CHECKPOINT_STEP,
    RESUMED,
    SAMPLE,
    CommandState,
    Event,
    Summary,
    TrialState,
    Value,
)
from agents.state.preview_checks import MARK
from cockpit.data import format
from cockpit.data.log.outcomes import changes_text, command_text, trial_text
from cockpit.data.store import Store, Topic

EventLevel = Literal["info", "warning", "error"]
Logged = Event | CommandState | TrialState
LINE_END = "↵"  # shown where a line of a generated text ends


class Kind(Enum):
    """A kind of log entry; the log screen shows the enum value."""

    CHANGE = "change"
    TRIAL = "trial"
    ALERT = "alert"
    ENDED = "over"  # an alert has ended
    CHECKPOINT = "saved"
    RESUME = "resumed"
    CHECK = "preview"  # a preview compared with what was measured
    SAMPLE = "sample"  # a text that the model has generated
    EVENT = "event"


@dataclass(frozen=True)
class LogEntry:
    """One line of the run's log, such as an event, a knob change or an alert. `step`: the training step that the entry
    refers to, if any."""

    time_s: float
    level: EventLevel
    source: str
    text: str
    command: CommandState | None = None  # the command or trial that the line describes
    trial: TrialState | None = None
    kind: Kind = Kind.EVENT
    step: int | None = None
    estimated: bool = False  # the step is estimated from the time of the entry
    facts: Mapping[str, Value] = field(default_factory=dict, compare=False)
    lines: tuple[str, ...] = ()  # the lines of a generated sample; `text` joins and quotes them

    @property
    def headline(self) -> str:
        """The entry's text as the log screen shows it. Text that the model generated is preceded by the word `sample`,
        because it may look like another entry."""
        return f"{self.kind.value} {self.text}" if self.kind is Kind.SAMPLE else self.text

    @property
    def key(self) -> tuple[object, ...]:
        """A key that identifies the entry and stays the same when the entry's state changes."""
        if about := self.command or self.trial:
            return self.kind, about.id
        return self.kind, self.time_s, self.source, self.text

    @property
    def subject(self) -> tuple[str, str] | None:
        """The name and the subject of the alert that the entry reports; None for other entries."""
        name, subject = self.facts.get(ALERT), self.facts.get("subject")
        return (str(name), str(subject)) if self.kind in (Kind.ALERT, Kind.ENDED) else None

    @property
    def rank(self) -> int | None:
        """The rank that the event names in its facts, if any."""
        rank = self.facts.get("rank")
        return rank if isinstance(rank, int) and not isinstance(rank, bool) else None


@dataclass(frozen=True)
class Mark:
    """A step with a mark on the curves screen: a step at which a knob change was applied, or one that the user
    marked."""

    step: int
    label: str


def log_entries(store: Store) -> list[LogEntry]:
    """Events and the outcome of each command and trial, in the hub's order. The list is cached, so callers must not
    change it."""
    return store.once("log", (Topic.BOARD, Topic.EVENTS), lambda: _entries(store))


def _entries(store: Store) -> list[LogEntry]:
    dated = Dated(store.state.summaries)
    # An entry is made once for each update: the updates are immutable, and an estimated step must not change later.
    known: dict[int, tuple[Logged, LogEntry]] = store.once("known log entries", (), dict)
    found = [known.get(id(logged)) or (logged, _entry(logged, dated)) for logged in store.state.log()]
    known.clear()
    known.update((id(pair[0]), pair) for pair in found)
    return [entry for _, entry in found]


class Dated:
    """Finds the step that a run had reached at a given time, among the steps whose summaries are kept."""

    def __init__(self, summaries: Sequence[Summary]) -> None:
        self._times = [summary.time_s for summary in summaries]
        self._steps = [summary.step for summary in summaries]

    def step(self, time_s: float) -> int | None:
        """The newest step that had ended at `time_s`; None if `time_s` is before the first step whose summary is
        kept."""
        place = bisect_right(self._times, time_s)
        return self._steps[place - 1] if place else None


def _entry(logged: Logged, dated: Dated) -> LogEntry:
    match logged:
        case CommandState():
            level: EventLevel = "info" if logged.state in ("accepted", "applied") else "warning"
            step = logged.applied_step
            return LogEntry(
                logged.time_s,
                level,
                format.clean(logged.who),
                command_text(logged),
                command=logged,
                kind=Kind.CHANGE,
                step=dated.step(logged.time_s) if step is None else step,
                estimated=step is None,
            )
        case TrialState():
            return LogEntry(
                logged.time_s,
                "warning" if logged.state == "failed" else "info",
                format.clean(logged.who),
                trial_text(logged),
                trial=logged,
                kind=Kind.TRIAL,
                step=dated.step(logged.time_s),
                estimated=True,
            )
        case Event():
            kind = kind_of(logged)
            step = _step_of(logged, kind)
            lines = tuple(map(format.clean, logged.text.split("\n"))) if kind is Kind.SAMPLE else ()
            return LogEntry(
                logged.time_s,
                logged.level,
                format.clean(logged.source),
                f"“{LINE_END.join(lines)}”" if lines else format.clean(logged.text),
                kind=kind,
                step=dated.step(logged.time_s) if step is None else step,
                estimated=step is None,
                facts=logged.facts,
                lines=lines,
            )


# The first test that an event passes gives its kind.
_KINDS: tuple[tuple[Kind, Callable[[Mapping[str, Value]], bool]], ...] = (
    (Kind.ALERT, lambda facts: ALERT in facts and facts.get("active") is True),
    (Kind.ENDED, lambda facts: ALERT in facts),
    (Kind.RESUME, lambda facts: facts.get(RESUMED) is True),
    (Kind.CHECKPOINT, lambda facts: CHECKPOINT_STEP in facts),
    (Kind.CHECK, lambda facts: MARK in facts),
    (Kind.SAMPLE, lambda facts: facts.get(SAMPLE) is True),
)


def kind_of(event: Event) -> Kind:
    """The kind of log entry for an event, determined by the machine-readable details in the event (`facts`)."""
    return next((kind for kind, holds in _KINDS if holds(event.facts)), Kind.EVENT)


def _step_of(event: Event, kind: Kind) -> int | None:
    """The training step recorded in the event's facts; None if the facts contain no step. A checkpoint event gives the
    number of completed steps, so it belongs to the last of these steps.
    """
    value = event.facts.get(CHECKPOINT_STEP if kind in (Kind.CHECKPOINT, Kind.RESUME) else "step")
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return None
    return max(0, value - 1) if kind is Kind.CHECKPOINT else value


def marks(store: Store) -> list[Mark]:
    """The steps at which knob changes were applied, and the steps that the user marked, in ascending order."""
    applied = [command for command in store.state.commands.values() if command.state == "applied"]
    changes = [
        Mark(command.applied_step, changes_text(command))
        for command in sorted(applied, key=lambda command: command.revision)
        if command.applied_step is not None
    ]
    named = [Mark(mark.step, mark.text) for mark in store.named_marks]
    return sorted([*changes, *named], key=lambda mark: mark.step)


def newest_checkpoint(store: Store) -> int | None:
    """The number of completed steps that the newest checkpoint event gives; None if there is none."""
    steps = (event.facts.get(CHECKPOINT_STEP) for event in reversed(store.state.events))
    return next((step for step in steps if isinstance(step, int)), None)


def ended_after(entries: Iterable[LogEntry]) -> dict[tuple[object, ...], LogEntry]:
    """Maps the key of each entry that reports the beginning of an alert to the entry that reports the end of this
    alert. Active alerts are left out."""
    active: dict[tuple[str, str], LogEntry] = {}
    ends: dict[tuple[object, ...], LogEntry] = {}
    for entry in entries:
        subject = entry.subject
        if subject and entry.kind is Kind.ALERT:
            active[subject] = entry
        elif subject and (raised := active.pop(subject, None)):
            ends[raised.key] = entry
    return ends
