"""The store holds the state of a run, and what a client adds to it: the state of its connection, its position in a
recording, and the hub's answers to its preview queries.

A live stream, a recording or a test fills the store in the same way. One thread writes to the store and another reads
from it; each holds `lock` while it does so. Each topic has a revision, so that a panel redraws only when its own data
has changed.
"""

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import PurePath
from typing import Any, TypeVar

from agents.protocol import (
    Experts,
    Loads,
    Previewed,
    Pulse,
    Step,
    Summary,
    Timeline,
    TrialState,
    Update,
    Value,
    Vitals,
)
from agents.state.run_state import RunState
from cockpit.data import format
from cockpit.data.curves.view import CurveView
from cockpit.data.history.experts import ExpertHistory
from cockpit.data.history.phases import Phases
from cockpit.data.history.ranks import RankHistory
from cockpit.data.history.timelines import Timelines
from cockpit.data.history.traffic import TrafficHistory
from cockpit.data.link import Fault, LinkState, PlaybackPosition, link_state
from cockpit.data.marks import NamedMarks
from cockpit.data.update_kinds import UPDATE_KINDS
from cockpit.data.update_kinds import Topic as Topic

T = TypeVar("T")

# a rank this far behind the newest step still counts as reporting, because records arrive one after another
LAG_MS = 1000.0
PART = 256  # number of updates of a new state that the histories read at a time


class Store:
    """The state of a run for screens and commands. `clock` returns the current time in seconds; by default, it is the
    monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.state = RunState()
        self.revisions: Counter[Topic] = Counter()
        self.rank_history = RankHistory()
        self.expert_history = ExpertHistory()
        self.traffic = TrafficHistory()
        self.rank_records = True  # False: this client receives no per-rank records (low bandwidth)
        self.phases = Phases(self.stage_of)
        self.timelines = Timelines(self.phases.time_ms)
        self.folder = (
            ""  # name of the run's folder, by which commands find the run; "" if the source does not know it
        )
        self.refused: str | None = None  # why the hub refuses this client
        self.source_error: str | None = None  # error of the source, such as the exit of the engine
        self.fault: Fault | None = None  # unexpected error of the cockpit that ended the source
        self.playback_position: PlaybackPosition | None = None  # None for a live run
        self.previews: dict[str, Previewed] = {}  # answers to the preview queries of this client, by id
        self.denied: dict[str, str] = {}  # why the hub refused a request of this client, by its id
        self.curve_view = CurveView(lambda: self.state, self._curves_changed)
        self.named_marks = NamedMarks()  # marks that the user sets
        self.live: Store | None = None  # in a frozen store: the store of which it is a copy
        self.last_message_at: float | None = None
        self.behind_s = 0.0  # for how long the state has been older than the last message
        self.unanswered = False  # the hub has not sent anything yet
        # parts of a snapshot: those received, and all of them; None if none is on its way
        self.loading: tuple[int, int] | None = None
        self._restarts = 0  # number of restarts of the ranks that the histories include
        self._cache: dict[object, tuple[tuple[object, ...], Any]] = {}

    # ------------------------------------------------------------------------------------------- writing

    def apply(self, updates: Iterable[Update]) -> None:
        """Apply updates to the state."""
        updates = list(updates)
        for update in updates:
            self.state.apply(update)
        self.note(updates)

    def note(self, updates: Iterable[Update]) -> None:
        """Update the histories, and the revisions of the topics that have changed, after a client or a replay has
        applied `updates` to `state`."""
        updates = list(updates)
        if self.state.restarts != self._restarts:
            self._forget_ranks()
        for kind, count in Counter(map(type, updates)).items():
            for topic in UPDATE_KINDS[kind].topics:
                self.revisions[topic] += count
        of_ranks: list[Step | Vitals] = []
        steps: list[Step] = []
        for update in updates:
            if isinstance(update, Step):  # in large runs, nearly all updates are of three kinds
                of_ranks.append(update)
                steps.append(update)
            elif isinstance(update, Vitals):
                of_ranks.append(update)
            elif not isinstance(update, Pulse):
                self._note_one(update)
        self.rank_history.note(of_ranks)
        self.phases.note(steps)

    def _forget_ranks(self) -> None:
        """Forget the histories of ranks, because new processes have replaced the ranks, perhaps in another layout."""
        self._restarts = self.state.restarts
        self.expert_history.clear()
        self.traffic.adopt(self.state)
        self.rank_history.keep_only({})
        for keeper in (self.phases, self.timelines):
            keeper.cut(0)
        self.revisions.update(Topic)

    def _note_one(self, update: Update) -> None:
        self.traffic.note(update)
        match update:
            case Experts() | Loads():
                self.expert_history.add(update)
            case Summary():
                self.curve_view.note(update)
            case Timeline():
                self.timelines.note(update)

    def adopt(self, state: RunState) -> None:
        """Replace the state, but keep the histories of the ranks that the new state contains."""
        self.state = state
        if state.experts is None and state.loads is None:
            self.expert_history.clear()
        self.curve_view.detail = None
        self.traffic.adopt(state)
        self.rank_history.keep_only(state.hellos)
        newest = max((step.step for step in state.steps.values()), default=-1)
        for keeper in (self.phases, self.timelines):
            keeper.cut(newest + 1)  # a recording was rewound, or the run resumed while the client was away
        updates = iter(state.replay())
        while part := list(islice(updates, PART)):  # all updates at once would double the memory of the state
            self.note(part)
        self.revisions.update(Topic)

    def set_expert_history(self, history: ExpertHistory) -> None:
        """Replace the history of the expert load with a history that was read from a recording."""
        self.expert_history = history
        self.revisions[Topic.EXPERTS] += 1

    def rebuild(self, updates: Iterable[Update]) -> None:
        """Rebuild the state from the updates of a snapshot."""
        state = RunState()
        for update in updates:
            state.apply(update)
        self.adopt(state)

    def set_message_age(self, age_s: float | None, behind_s: float = 0.0) -> None:
        """Record that the hub's last message arrived `age_s` seconds ago, and that the state has lagged behind the
        hub's messages for `behind_s` seconds."""
        self.behind_s = behind_s
        if age_s is not None:
            self.last_message_at = self.clock() - age_s

    def set_answers(self, previews: Mapping[str, Previewed], denied: Mapping[str, str]) -> None:
        """Set the previews that the hub sent to this client, and the reasons why the hub refused its requests."""
        if previews.keys() != self.previews.keys() or denied.keys() != self.denied.keys():
            self.previews, self.denied = dict(previews), dict(denied)
            self.revisions[Topic.BOARD] += 1

    # -------------------------------------------------------------------------------------------- reading

    def once(
        self, name: object, topics: tuple[Topic, ...], compute: Callable[[], T], also: object = None
    ) -> T:
        """The cached result of `compute()`, recomputed when `also` or a revision of `topics` has changed."""
        version = (also, *(self.revisions[topic] for topic in topics))
        cached = self._cache.get(name)
        if cached is None or cached[0] != version:
            cached = self._cache[name] = (version, compute())
        value: T = cached[1]
        return value

    def frozen(self) -> "Store":
        """A copy that later updates do not change (messages are immutable, so only containers are copied)."""
        still = copy.copy(self)
        still.state = copy.copy(self.state)
        for name, value in vars(self.state).items():
            setattr(still.state, name, copy.copy(value))
        still.revisions = self.revisions.copy()
        still.rank_history = self.rank_history.copy()
        still.expert_history = self.expert_history.copy()
        still.curve_view = self.curve_view.copy(lambda: still.state, still._curves_changed)
        still.traffic = self.traffic.copy()
        still.phases = self.phases.copy(still.stage_of)
        still.timelines = self.timelines.copy(still.phases.time_ms)
        still._cache = {}
        still.live = self
        now = self.clock()
        still.clock = lambda: now
        return still

    @property
    def age_s(self) -> float | None:
        """Seconds since the last message from the hub."""
        return None if self.last_message_at is None else max(0.0, self.clock() - self.last_message_at)

    @property
    def frozen_s(self) -> float | None:
        """Seconds since this copy was made; None for a store that is not frozen."""
        return self.live.clock() - self.clock() if self.live else None

    def marked(self) -> None:
        """Have the curves redrawn. Called after `named_marks` has changed."""
        self._curves_changed()
        if self.live:
            self.live.marked()

    def _curves_changed(self) -> None:
        self.revisions[Topic.CURVES] += 1

    @property
    def link(self) -> LinkState:
        """State of the connection, derived from the ranks that have left, the playback position and the age of the last
        message."""
        return link_state(self.state, self.age_s, self.playback_position is not None, self.finished)

    @property
    def finished(self) -> bool:
        """Whether every planned step is done."""
        planned = self.steps_planned
        return planned is not None and self.step is not None and self._counted(self.step) >= planned

    @property
    def world(self) -> int:
        return self.once("world", (Topic.GRID,), lambda: self.state.world)

    @property
    def run(self) -> str:
        """The name of the run, without control characters."""
        name = self.fact("name")
        if isinstance(name, str):
            return format.clean(name)
        return next((format.clean(hello.run) for hello in self.state.hellos.values()), format.MISSING)

    def fact(self, name: str) -> Value:
        """The value of the fact `name`, a property of the run, such as its model size, that ranks report in their hello
        messages. The first rank that reports it counts."""
        ranks = id(self.state), len(self.state.hellos)
        return self.once(("fact", name), (Topic.GRID,), lambda: self._fact(name), ranks)

    def _fact(self, name: str) -> Value:
        for hello in self.state.hellos.values():
            if name in hello.facts:
                return hello.facts[name]
        return None

    @property
    def run_name(self) -> str | None:
        """The name by which commands find the run: that of its folder, or else that under which its ranks joined. None
        if neither is known."""
        told = self.fact("folder")
        joined = next((hello.run for hello in self.state.hellos.values()), None)
        return self.folder or (PurePath(told).name if isinstance(told, str) else "") or joined

    def number(self, name: str) -> int | None:
        """The value of the fact `name`, which ranks report about the run, if it is an integer; otherwise None."""
        value = self.fact(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def simulated(self) -> bool:
        """Whether the run is a simulation, in which nothing trains. A hub never has both simulated and real ranks."""
        hello = next(iter(self.state.hellos.values()), None)
        return hello is not None and hello.simulated

    @property
    def steps_planned(self) -> int | None:
        return self.number("steps")

    @property
    def summary(self) -> Summary | None:
        return self.state.summaries[-1] if self.state.summaries else None

    @property
    def step(self) -> int | None:
        """The newest step that any rank has reported; in a recording, the newest step that has a summary at the current
        position.
        """
        return self.once("step", (Topic.RANKS, Topic.CURVES), self._step)

    @property
    def steps_done(self) -> int | None:
        """The number of steps done, up to and including the step of the newest summary; the screen shows the values of
        that summary. The ranks' step records may already be one step newer than the summary."""
        newest = self.summary.step if self.summary else self.step
        return None if newest is None else self._counted(newest)

    def _counted(self, step: int) -> int:
        """The number of steps that are done once the step with number `step` has ended."""
        hello = next(iter(self.state.hellos.values()), None)
        return step + 1 - (hello.first_step if hello else 0)

    def _step(self) -> int | None:
        if self.playback_position and self.summary:
            # Records of ranks may be newer, but a position is identified by the step of the summary.
            return self.summary.step
        steps = [step.step for step in self.state.steps.values()]
        if self.summary:
            steps.append(self.summary.step)
        return max(steps, default=None)

    @property
    def oversubscribed(self) -> bool:
        summary = self.summary
        return bool(summary.oversubscribed if summary else self.fact("oversubscribed"))

    @property
    def present(self) -> list[int]:
        """Ranks that have joined and have not left."""
        gone = self.state.gone
        return [rank for rank in self.state.hellos if rank not in gone] if gone else list(self.state.hellos)

    @property
    def not_lost(self) -> list[int]:
        """Ranks that have joined and were not lost, including those that left cleanly."""
        gone = self.state.gone
        if not gone:
            return list(self.state.hellos)
        return [rank for rank in self.state.hellos if rank not in gone or gone[rank].clean]

    @property
    def reporting(self) -> list[int]:
        """Ranks whose newest record is at most one step, or `LAG_MS`, behind the newest step of the run."""
        return self.once("reporting", (Topic.GRID, Topic.RANKS, Topic.CURVES), self._reporting)

    def _reporting(self) -> list[int]:
        newest = self.step
        if newest is None:
            return []
        steps, step_ms = self.state.steps, self.state.step_ms
        lag = max(1, int(LAG_MS / step_ms)) if step_ms else 1
        return [rank for rank in self.present if rank in steps and steps[rank].step >= newest - lag]

    def stage_of(self, rank: int) -> int:
        """The pipeline coordinate of a rank; 0 in a run without pipeline parallelism."""
        hello = self.state.hellos.get(rank)
        return hello.coords.get("pp", 0) if hello else 0

    def coverage(self) -> str:
        """The number of reporting ranks and of all ranks, such as ``8/8``; without per-rank records, the number of
        ranks that have joined."""
        width = len(str(self.world))
        if not self.rank_records:
            return f"{len(self.present):>{width}}/{self.world}"
        return f"{len(self.reporting):>{width}}/{self.world}"

    def axes(self) -> list[str]:
        """The parallel axes of the run, such as pp and dp, in the order of the rank grid, outermost first."""
        hello = next(iter(self.state.hellos.values()), None)
        return list(hello.coords) if hello else []

    def name(self, rank: int) -> str:
        """The name of a rank, such as ``rank 5 (pp1 dp0 tp1)``."""
        hello = self.state.hellos.get(rank)
        return f"rank {rank} ({format.coords(hello.coords)})" if hello and hello.coords else f"rank {rank}"

    @property
    def trial(self) -> TrialState | None:
        """The running trial; there is at most one."""
        return next((trial for trial in self.state.trials.values() if not trial.settled), None)
