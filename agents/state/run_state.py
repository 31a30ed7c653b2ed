"""The state of a run, built from updates by a pure reducer.

The hub keeps a state, from which it makes snapshots; `replay` returns the shortest list of updates that rebuilds the
state. Each client keeps its own copy of the state. Replaying a recording up to a sequence number rebuilds the state
after that update. This module reads no clock.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping

from agents.protocol import (
    MISSING_STEPS,
    RECORDS,
    Alert,
    Board,
    CommandState,
    Event,
    Experts,
    Gone,
    Hello,
    Loads,
    Peers,
    Pulse,
    Recalled,
    Record,
    Step,
    Summary,
    Timeline,
    TrialState,
    Update,
    Vitals,
)
from agents.state.encoded_records import EncodedRecords
from agents.state.hellos import Hellos
from agents.state.metric_curves import Curve, Point

HISTORY = 1024  # number of newest summaries kept in full; older summaries are kept as a curve
# Maximum number of commands kept; refused ones are dropped first, then settled ones, oldest first.
COMMANDS = 1024
TRIALS = 64  # maximum number of trials kept
EVENTS = 1024  # maximum number of events kept


class RunState:
    """The newest records of each rank, and the run's curves, commands and events."""

    def __init__(self) -> None:
        self.hellos: dict[int, Hello] = Hellos()
        self.restarts = 0  # how often the launcher of these ranks had started them again
        self.steps: dict[int, Step] = {}
        self.pulses: dict[int, Pulse] = {}
        self.vitals: dict[int, Vitals] = {}
        self.timelines: EncodedRecords[Timeline] = EncodedRecords(Timeline)
        self.peers: EncodedRecords[Peers] = EncodedRecords(Peers)
        self._records: dict[type[Update], MutableMapping[int, Record]] = {
            Step: self.steps,  # type: ignore[dict-item]
            Pulse: self.pulses,  # type: ignore[dict-item]
            Vitals: self.vitals,  # type: ignore[dict-item]
            Timeline: self.timelines,  # type: ignore[dict-item]
            Peers: self.peers,  # type: ignore[dict-item]
        }
        self.gone: dict[int, Gone] = {}
        self.board: Board | None = None
        self.experts: Experts | None = None
        self.loads: Loads | None = None
        self.summaries: list[Summary] = []  # the newest summaries, by step
        self.curve = Curve()  # curve of the steps before `summaries`
        self.commands: dict[str, CommandState] = {}
        self.trials: dict[str, TrialState] = {}
        self.events: deque[Event] = deque(maxlen=EVENTS)
        # Number of all events; number of all changes of commands and trials.
        self._events_count = self._count = 0
        # Positions of commands and trials in the log; see `log`.
        self._places: dict[tuple[type, str], tuple[int, int]] = {}
        self.alerts: dict[tuple[str, str], Alert] = {}  # active alerts, by name and subject

    def records(self) -> dict[type[Update], MutableMapping[int, Record]]:
        """The newest records by kind and rank. Returns the state's own dictionaries, not copies."""
        return self._records

    @property
    def world(self) -> int:
        return max((hello.world for hello in self.hellos.values()), default=0)

    @property
    def step_ms(self) -> float | None:
        """The duration of the newest step in ms; None before the first step."""
        if self.summaries:
            return self.summaries[-1].step_ms
        return next((step.step_ms for step in self.steps.values()), None)

    def points(self, metric: str) -> list[Point]:
        """The (step, value) pairs of a metric in `metric_curves.METRICS` over the whole run. Of the steps that are
        older than all `summaries`, only those that the thinned curve still has are included.
        """
        newest = ((summary.step, getattr(summary, metric)) for summary in self.summaries)
        return self.curve.points(metric) + [(step, value) for step, value in newest if value is not None]

    def newest(self, metric: str) -> Point | None:
        """The newest (step, value) pair of a metric in `metric_curves.METRICS`. None if the metric was never
        measured."""
        for summary in reversed(self.summaries):
            if (value := getattr(summary, metric)) is not None:
                return summary.step, value
        return next(reversed(self.curve.points(metric)), None)

    def apply(self, update: Update) -> None:
        if isinstance(update, RECORDS):  # a test against a tuple is faster than against a union
            self._records[type(update)][update.rank] = update
            return
        match update:
            case Summary():
                self._add_summary(update)
            case Experts():
                self.experts = update
            case Loads():
                self.loads = update
            case Hello():
                if update.restarts != self.restarts:
                    self._forget_ranks()
                self.restarts = update.restarts
                self.hellos[update.rank] = update
                self.gone.pop(update.rank, None)
            case Board():
                self.board = update
            case CommandState():
                self._add_command(update)
            case TrialState():
                self._place(update, self.trials.get(update.id))
                self.trials[update.id] = update
                if len(self.trials) > TRIALS:
                    settled = (known.id for known in self.trials.values() if known.settled)
                    gone = next(settled, next(iter(self.trials)))
                    del self.trials[gone], self._places[TrialState, gone]
            case Event():
                self.events.append(update)
                self._events_count += 1
            case Alert():
                self.alerts.pop((update.name, update.subject), None)
                if update.active:
                    self.alerts[update.name, update.subject] = update
            case Gone():
                self.gone[update.rank] = update
            case Recalled():
                self._recall(update)

    def _forget_ranks(self) -> None:
        """Remove the knob board, the expert loads and all per-rank data, because new processes have replaced the ranks,
        perhaps in another layout.
        """
        self.hellos.clear()
        self.gone.clear()
        for records in self._records.values():
            records.clear()
        self.board = self.experts = self.loads = None

    def _add_command(self, command: CommandState) -> None:
        self._place(command, self.commands.get(command.id))
        self.commands[command.id] = command
        if len(self.commands) > COMMANDS:
            # Refused commands are dropped first, so that applied changes can still be found and undone.
            others = [known for known in self.commands.values() if known.id != command.id]
            refused = (known.id for known in others if not known.revision)
            settled = (known.id for known in others if known.settled)
            gone = next(refused, next(settled, others[0].id))
            del self.commands[gone], self._places[CommandState, gone]

    def _place(self, new: CommandState | TrialState, known: CommandState | TrialState | None) -> None:
        """Place the command or trial at the end of the log. If the time of a known command or trial is unchanged, the
        new state only adds details, so the position in the log is kept.
        """
        if known is None or known.time_s != new.time_s:
            self._count += 1
            self._places[type(new), new.id] = (self._events_count, self._count)

    def log(self) -> Iterator[Event | CommandState | TrialState]:
        """Events, commands and trials in the order of publication, not of time, because the hub's clock may jump. Those
        before the first event are in the order of time, because a restarted hub publishes all commands of its journal,
        and then all trials.
        """
        self._order_earliest()
        first = self._events_count - len(self.events) + 1
        entries: list[tuple[tuple[int, int], Event | CommandState | TrialState]] = []
        entries += [((first + number, 0), event) for number, event in enumerate(self.events)]
        entries += [(self._places[CommandState, id], known) for id, known in self.commands.items()]
        entries += [(self._places[TrialState, id], known) for id, known in self.trials.items()]
        return (entry for _, entry in sorted(entries, key=lambda one: one[0]))

    def _add_summary(self, summary: Summary) -> None:
        newest = self.summaries[-1].step if self.summaries else self.curve.last
        if newest is not None and summary.step <= newest:
            # The run resumed from a checkpoint, or the summary was sent again. In both cases the newer summary of a
            # step is kept.
            del self.summaries[bisect_left(self.summaries, summary.step, key=_step) :]
            self.curve.cut(summary.step)
        self.summaries.append(summary)
        self._fold()

    def _recall(self, past: Recalled) -> None:
        """Insert history that is older than all data in this state."""
        first = self.curve.first if self.curve else self.summaries[0].step if self.summaries else None
        self.summaries[:0] = [one for one in past.summaries if first is None or one.step < first]
        self._fold()
        for part in past.curve:
            self.curve.insert(part, self.summaries[0].step if self.summaries else None)
        room = EVENTS - len(self.events)
        self._put_in_front(past.events[-room:] if room else [])

    def _put_in_front(self, events: list[Event]) -> None:
        """Insert the events of an earlier hub process before all other events. Commands and trials that the log lists
        before its first event, such as those from the journal, are sorted by time into the inserted events.
        """
        between = 0
        earliest = self._order_earliest()
        for key, (after, count) in self._places.items():
            if after:
                self._places[key] = after + len(events), count
        for key in earliest:
            while between < len(events) and events[between].time_s <= self._time_of(key):
                between += 1
            self._places[key] = between, self._places[key][1]
        self.events.extendleft(reversed(events))
        self._events_count += len(events)

    def _order_earliest(self) -> list[tuple[type, str]]:
        """Order the commands and trials that precede the first event by time; returns them in this order."""
        earliest = [key for key, (after, _) in self._places.items() if after == 0]
        counts = sorted(self._places[key][1] for key in earliest)
        earliest.sort(key=lambda key: (self._time_of(key), self._places[key][1]))
        for key, count in zip(earliest, counts, strict=True):
            self._places[key] = 0, count
        return earliest

    def _time_of(self, key: tuple[type, str]) -> float:
        known = self.commands if key[0] is CommandState else self.trials
        return known[key[1]].time_s

    def _fold(self) -> None:
        """Move summaries into the curve: all but the newest `HISTORY`, and also those of steps that the curve already
        covers.
        """
        last = self.curve.last
        covered = 0 if last is None else bisect_right(self.summaries, last, key=_step)
        most = max(covered, len(self.summaries) - HISTORY)
        if most > 0:
            self.curve.extend(self.summaries[:most])
            del self.summaries[:most]

    def replay(self) -> Iterator[Update]:
        """The updates that rebuild this state from an empty state."""
        yield from self.hellos.values()
        if self.board:
            yield self.board
        yield from (Recalled(curve=[part]) for part in self.curve.parts())
        yield from self.summaries
        for records in self._records.values():
            yield from records.values()
        if self.experts:
            yield self.experts
        if self.loads:
            yield self.loads
        yield from self.log()
        yield from self.alerts.values()
        yield from self.gone.values()


def missing_steps(updates: Iterable[Update]) -> Iterator[str]:
    """The text of each event among `updates` which says that the records of some steps never reached the hub."""
    for update in updates:
        if isinstance(update, Event) and MISSING_STEPS in update.facts:
            yield update.text


def _step(summary: Summary) -> int:
    return summary.step
