"""All a screen knows of a run: the run's state, and the facts of the view that are no part of it.

Textual-free, and fed alike by a live stream, a recording or a test. One thread feeds, another looks; both hold
`lock`. Each kind of thing has a revision, so that a panel redraws only when what it shows has changed.
"""

import copy
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from agents.protocol import CommandState, Event, Previewed, Pulse, Step, Summary, TrialState, Update, Value
from agents.state.curve import Curve
from agents.state.run_state import RunState
from cockpit.data import format
from cockpit.data.curves import View
from cockpit.data.outcomes import changes_text, command_text, trial_text
from cockpit.data.topics import TOPICS
from cockpit.data.topics import Topic as Topic

T = TypeVar("T")

STALE_AFTER_S = 3.0
LAG_MS = 1000.0  # records of ranks come by turns: so far behind the newest step, a rank still reports
RECENT_STEPS = 8  # records kept per rank: enough to tell a slow rank from one slow step


class LinkState(Enum):
    """How the picture stands to the run; the value is what the status line says."""

    WAITING = "WAITING"
    LIVE = "LIVE"
    PLAYBACK = "PLAYBACK"
    STALE = "STALE"
    ENDED = "ENDED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Playing:
    """Where in a recording the picture is from; times in seconds since the epoch, of the hub's clock."""

    at_s: float
    first_s: float
    last_s: float
    speed: float
    paused: bool
    thinned: bool  # what single ranks said then is no longer kept

    @property
    def share(self) -> float:
        """0 at the beginning of the recording, 1 at its end."""
        length = self.last_s - self.first_s
        return min(1.0, max(0.0, (self.at_s - self.first_s) / length)) if length > 0 else 1.0


@dataclass(frozen=True)
class Mark:
    """A knob change, as drawn on a curve."""

    step: int
    label: str


@dataclass(frozen=True)
class LogEntry:
    """One line of the run's log."""

    time_s: float
    level: str
    source: str
    text: str
    command: CommandState | None = None  # that it is about
    trial: TrialState | None = None


@dataclass(frozen=True)
class Fault:
    """What ended a feed unforeseen: the error in a line, how to go on, and the traceback for a report."""

    error: str
    go_on: str
    trace: str


class Store:
    """The run as the screens see it. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.state = RunState()
        self.revisions: Counter[Topic] = Counter()
        self.recent: dict[int, deque[Step]] = {}
        self.pulse_seen: dict[int, float] = {}
        self.refused: str | None = None  # why the hub does not serve us
        self.trouble: str | None = None  # what went wrong with a run of our own
        self.fault: Fault | None = None  # of the cockpit's own, that ended the feed
        self.playing: Playing | None = None  # where in a recording this is; None: it is the run itself
        self.previews: dict[str, Previewed] = {}  # what this cockpit asked, and was told
        self.denied: dict[str, str] = {}  # why the hub does not take what this cockpit asked, by its id
        self.view: View | None = None  # the steps that curves show; None: all
        self.detail: Curve | None = None  # of those, every step, where a recording has it
        self.heard_at: float | None = None
        self._known: dict[object, tuple[tuple[object, ...], Any]] = {}

    # ------------------------------------------------------------------------------------------- feeding

    def apply(self, updates: Iterable[Update]) -> None:
        updates = list(updates)
        for update in updates:
            self.state.apply(update)
        self.note(updates)

    def note(self, updates: Iterable[Update]) -> None:
        """Take updates that `state` holds already: it may be a client's or a replay's own, so that none is applied
        twice."""
        for update in updates:
            for topic in TOPICS[type(update)]:
                self.revisions[topic] += 1
            match update:
                case Step():
                    self._remember(update)
                case Pulse():
                    self.pulse_seen[update.rank] = self.clock()
                case Summary() if self.detail:
                    self.detail.cut(update.step)  # done anew

    def adopt(self, state: RunState) -> None:
        """Go on with another state. What is remembered of the ranks stays where it follows on."""
        self.state = state
        self.pulse_seen.clear()
        self.note(state.replay())
        for rank in [rank for rank in self.recent if rank not in state.hellos]:
            del self.recent[rank]
        self.revisions.update(Topic)

    def rebuild(self, updates: Iterable[Update]) -> None:
        """Begin again from a snapshot."""
        state = RunState()
        for update in updates:
            state.apply(update)
        self.adopt(state)

    def heard(self, age_s: float | None) -> None:
        """The hub was last heard `age_s` seconds ago."""
        if age_s is not None:
            self.heard_at = self.clock() - age_s

    def told(self, previews: Mapping[str, Previewed], denied: Mapping[str, str]) -> None:
        """What the hub has answered to this cockpit alone."""
        if previews.keys() != self.previews.keys() or denied.keys() != self.denied.keys():
            self.previews, self.denied = dict(previews), dict(denied)
            self.revisions[Topic.BOARD] += 1

    def look_at(self, view: View | None) -> None:
        """Have curves show the steps of `view` alone; None: all."""
        self.view, self.detail = view, None
        self.revisions[Topic.CURVES] += 1

    def found(self, view: View, detail: Curve) -> None:
        """Take what a recording has of a view, unless another is looked at by now."""
        if view == self.view:
            self.detail = detail
            self.revisions[Topic.CURVES] += 1

    def _remember(self, step: Step) -> None:
        recent = self.recent.setdefault(step.rank, deque(maxlen=RECENT_STEPS))
        if recent and step.step <= recent[-1].step:
            if step.step == recent[-1].step:
                return
            recent.clear()  # resumed from an earlier snapshot
        recent.append(step)

    # -------------------------------------------------------------------------------------------- looking

    def once(
        self, name: object, topics: tuple[Topic, ...], compute: Callable[[], T], also: object = None
    ) -> T:
        """`compute()`, but only when one of `topics` has moved on, or `also` is another: many panels ask the same of
        many ranks."""
        seen = (also, *(self.revisions[topic] for topic in topics))
        known = self._known.get(name)
        if known is None or known[0] != seen:
            known = self._known[name] = (seen, compute())
        value: T = known[1]
        return value

    def frozen(self) -> "Store":
        """The picture as it is now, apart from the stream (messages are immutable: only containers are copied)."""
        still = copy.copy(self)
        still.state = copy.copy(self.state)
        for name, value in vars(self.state).items():
            setattr(still.state, name, copy.copy(value))
        still.revisions = self.revisions.copy()
        still.recent = {rank: recent.copy() for rank, recent in self.recent.items()}
        still.pulse_seen = dict(self.pulse_seen)
        still._known = {}
        now = self.clock()
        still.clock = lambda: now
        return still

    @property
    def age_s(self) -> float | None:
        """Seconds since the hub was last heard."""
        return None if self.heard_at is None else max(0.0, self.clock() - self.heard_at)

    @property
    def link(self) -> LinkState:
        state, age = self.state, self.age_s
        if not state.hellos:
            return LinkState.WAITING
        if len(state.gone) == len(state.hellos) and all(gone.over for gone in state.gone.values()):
            return LinkState.ENDED if all(gone.clean for gone in state.gone.values()) else LinkState.FAILED
        if self.playing:
            return LinkState.PLAYBACK
        if age is None or age > STALE_AFTER_S:
            return LinkState.ENDED if self.finished else LinkState.STALE
        return LinkState.LIVE

    @property
    def finished(self) -> bool:
        """Every planned step is done."""
        planned = self.steps_planned
        return planned is not None and self.step is not None and self.step + 1 >= planned

    @property
    def world(self) -> int:
        return self.state.world

    @property
    def run(self) -> str:
        """The run's name, for people."""
        name = self.fact("name")
        if isinstance(name, str):
            return format.clean(name)
        return next((format.clean(hello.run) for hello in self.state.hellos.values()), format.MISSING)

    def fact(self, name: str) -> Value:
        """Something the ranks say of the run (the first that says it is believed)."""
        for hello in self.state.hellos.values():
            if name in hello.facts:
                return hello.facts[name]
        return None

    def number(self, name: str) -> int | None:
        value = self.fact(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def steps_planned(self) -> int | None:
        return self.number("steps")

    @property
    def summary(self) -> Summary | None:
        return self.state.summaries[-1] if self.state.summaries else None

    @property
    def step(self) -> int | None:
        """The newest step anybody has reported."""
        return self.once("step", (Topic.RANKS, Topic.CURVES), self._step)

    def _step(self) -> int | None:
        steps = [step.step for step in self.state.steps.values()]
        if self.summary:
            steps.append(self.summary.step)
        return max(steps, default=None)

    @property
    def oversubscribed(self) -> bool:
        summary = self.summary
        return bool(summary.oversubscribed if summary else self.fact("oversubscribed"))

    @property
    def here(self) -> list[int]:
        """Ranks that have said hello and are not gone."""
        return [rank for rank in self.state.hellos if rank not in self.state.gone]

    @property
    def unlost(self) -> list[int]:
        """Those, and the ranks that said goodbye: their last word stands."""
        gone = self.state.gone
        return [rank for rank in self.state.hellos if rank not in gone or gone[rank].clean]

    @property
    def reporting(self) -> list[int]:
        """Ranks whose record is of the newest step or the one before, or of a step that ended a moment before it."""
        return self.once("reporting", (Topic.GRID, Topic.RANKS, Topic.CURVES), self._reporting)

    def _reporting(self) -> list[int]:
        front = self.step
        if front is None:
            return []
        known, step_ms = self.state.steps, self.state.step_ms
        behind = max(1, int(LAG_MS / step_ms)) if step_ms else 1
        return [rank for rank in self.here if rank in known and known[rank].step >= front - behind]

    def coverage(self) -> str:
        """``8/8``."""
        width = len(str(self.world))
        return f"{len(self.reporting):>{width}}/{self.world}"

    def axes(self) -> list[str]:
        """Axes of the grid, outermost first, as the ranks name them."""
        hello = next(iter(self.state.hellos.values()), None)
        return list(hello.coords) if hello else []

    def name(self, rank: int) -> str:
        """``rank 5 (pp1 dp0 tp1)``."""
        hello = self.state.hellos.get(rank)
        return f"rank {rank} ({format.coords(hello.coords)})" if hello and hello.coords else f"rank {rank}"

    @property
    def trial(self) -> TrialState | None:
        """The trial that is under way; there is one at a time."""
        return next((trial for trial in self.state.trials.values() if not trial.settled), None)

    def marks(self) -> list[Mark]:
        """Applied knob changes, oldest first."""
        applied = [
            c for c in self.state.commands.values() if c.state == "applied" and c.applied_step is not None
        ]
        return [
            Mark(
                command.applied_step or 0,
                changes_text(command),
            )
            for command in sorted(applied, key=lambda command: command.revision)
        ]

    def journal(self) -> list[LogEntry]:
        """What has happened; not to be changed, for it is made once for all who ask."""
        return self.once("journal", (Topic.BOARD, Topic.EVENTS), self._journal)

    def _journal(self) -> list[LogEntry]:
        """Events, and what became of each command, in the order in which the hub told them."""
        return [_entry(told) for told in self.state.log()]

    def typical(self, rank: int, get: Callable[[Step], float | None]) -> float | None:
        """The median of a rank's recent records: one odd step does not make a slow rank."""
        values = [value for step in self.recent.get(rank, ()) if (value := get(step)) is not None]
        return median(values)


def _entry(told: Event | CommandState | TrialState) -> LogEntry:
    match told:
        case CommandState():
            level = "info" if told.state in ("accepted", "applied") else "warning"
            return LogEntry(told.time_s, level, format.clean(told.who), command_text(told), told)
        case TrialState():
            level = "warning" if told.state == "failed" else "info"
            return LogEntry(told.time_s, level, format.clean(told.who), trial_text(told), trial=told)
        case Event():
            return LogEntry(told.time_s, told.level, format.clean(told.source), format.clean(told.text))


def median(values: Iterable[float]) -> float | None:
    """The middle value (the upper of two), None of nothing; not-a-number does not take part."""
    ordered = sorted(value for value in values if not math.isnan(value))
    return ordered[len(ordered) // 2] if ordered else None
