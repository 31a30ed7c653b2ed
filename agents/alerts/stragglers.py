"""Slowness: of a rank beside those that do the same work, and of the run beside its own past.

A rank is judged by its own time, which is the step less what it waited for others: with collectives everybody's step
takes as long as the slowest's, and the slowest waits least.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from agents.alerts.finding import Finding, NewSummaries, compared_with, median, name_of, spread
from agents.protocol import Value
from agents.state.run_state import RunState

SPREADS = 5.0  # standard deviations of its peers: no less is slow
STILL = 0.5  # of the limits: a rank that was slow is so until it is under them
PAST_SPREADS = (
    3.0  # of single values before, for the median of some, which strays about half as far as they do
)
USUAL = 32  # values that say what is usual
ENOUGH = 8
NEWEST = 5  # steps of the run, whose median is compared with the usual


@dataclass(frozen=True)
class Limits:
    """How much above what it is compared with is slow, and over how many records of a rank."""

    records: int
    peers: float  # above the median of several peers
    pair: float  # above the only other one, or above a rank's own past: one figure says less than a median
    run: float  # a step of the run above the steps before


OWN_CORES = Limits(records=5, peers=0.15, pair=0.3, run=0.25)
SHARED_CORES = Limits(records=15, peers=0.3, pair=0.6, run=0.5)  # ranks are slow by turns there


def limits_of(state: RunState) -> Limits:
    shared = bool(state.summaries) and state.summaries[-1].oversubscribed
    return SHARED_CORES if shared else OWN_CORES


@dataclass
class Past:
    """A series of values: the newest, and what was usual before them under the same revision of the knobs."""

    newest: deque[float]
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL))
    revision: int | None = None

    @classmethod
    def of(cls, newest: int) -> "Past":
        return cls(deque(maxlen=newest))

    def add(self, value: float, revision: int, share: float) -> None:
        """A knob that is turned changes what is usual, so it is learnt anew."""
        if revision != self.revision:
            self.revision = revision
            self.newest.clear()
            self.usual.clear()
        if len(self.newest) == self.newest.maxlen and not self._far(self.newest[0], share):
            self.usual.append(self.newest[0])  # what is far off must not become what is usual
        self.newest.append(value)

    def risen(self, share: float) -> tuple[float, float] | None:
        """The median of the newest and the usual value, where the newest are far above it."""
        if len(self.newest) < (self.newest.maxlen or 0):
            return None
        now = median(self.newest)
        return (now, median(self.usual)) if self._far(now, share) else None

    def _far(self, value: float, share: float) -> bool:
        if len(self.usual) < ENOUGH:
            return False
        usual = median(self.usual)
        return usual > 0 and value > usual + max(
            share * usual, PAST_SPREADS * spread(list(self.usual), usual)
        )


class Straggler:
    """A rank that takes longer for its own work than its peers, which have the same stage and kind of device and so
    the same work. One without peers is compared with its own past."""

    holds, releases = 3, 3

    def __init__(self) -> None:
        self._own: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SHARED_CORES.records))
        self._pasts: defaultdict[int, Past] = defaultdict(lambda: Past.of(OWN_CORES.records))
        self._last: dict[int, int] = {}
        self._slow: set[int] = set()  # beside its peers, at the last look

    def look(self, state: RunState, now_s: float) -> list[Finding] | None:
        limits = limits_of(state)
        groups: defaultdict[object, list[int]] = defaultdict(list)
        for rank, hello in state.hellos.items():
            if rank not in state.gone:
                groups[hello.coords.get("pp"), _kind(hello.device)].append(rank)
        alone = {ranks[0] for ranks in groups.values() if len(ranks) == 1}
        if not self._take(state, alone, limits):
            return None
        findings = self._beside_their_past(state, alone, limits)
        for ranks in groups.values():
            findings += self._among(state, [rank for rank in ranks if rank not in alone], limits)
        return findings

    def _take(self, state: RunState, alone: set[int], limits: Limits) -> bool:
        """Take the records that are new; False if there are none."""
        new = [step for rank, step in state.steps.items() if self._last.get(rank) != step.step]
        for step in new:
            self._last[step.rank] = step.step
            self._own[step.rank].append(step.own_ms)
            if step.rank in alone:
                self._pasts[step.rank].add(step.own_ms, step.revision, limits.pair)
        return bool(new)

    def _among(self, state: RunState, ranks: list[int], limits: Limits) -> list[Finding]:
        known = {rank: list(self._own[rank])[-limits.records :] for rank in ranks}
        own = {rank: median(values) for rank, values in known.items() if len(values) == limits.records}
        if len(own) < 2:
            return []
        share = limits.pair if len(own) == 2 else limits.peers
        usual = compared_with(own)
        noise = (
            spread(list(own.values()), median(own.values())) if len(own) > 2 else 0.0
        )  # two have none to tell
        slow = [
            rank
            for rank in own  # where others do nothing but wait, no share of that can be told
            if usual[rank] > 0
            and own[rank] - usual[rank]
            > max(share * usual[rank], SPREADS * noise) * (STILL if rank in self._slow else 1.0)
        ]
        self._slow = (self._slow - set(own)) | set(slow)
        others = "the other rank" if len(own) == 2 else f"the {len(own) - 1} ranks"
        return [
            self._finding(state, rank, own[rank], usual[rank], f"{others} with the same work", len(own) - 1)
            for rank in slow
        ]

    def _beside_their_past(self, state: RunState, alone: set[int], limits: Limits) -> list[Finding]:
        risen = {rank: found for rank in sorted(alone) if (found := self._pasts[rank].risen(limits.pair))}
        if len(risen) == len(alone):
            return []  # all are slower: that is the run, see `Slowdown`
        return [
            self._finding(state, rank, now, usual, f"its own {usual:.0f} ms before", 0)
            for rank, (now, usual) in risen.items()
        ]

    def _finding(
        self, state: RunState, rank: int, own: float, usual: float, beside: str, peers: int
    ) -> Finding:
        text = f"{name_of(state, rank)} needs {own:.0f} ms of its own a step, {own / usual - 1:+.0%} against {beside}"
        evidence: dict[str, Value] = {"own_ms": round(own, 2), "peers_ms": round(usual, 2), "peers": peers}
        return Finding("straggler", f"rank {rank}", "warning", text, evidence, (rank,))


def _kind(device: str) -> str:
    """The kind of device that a rank names; "" where it names one of them, by number or UUID."""
    return "" if device.isdecimal() or device.startswith(("GPU-", "MIG-")) else device


class Slowdown:
    """Steps of the run that take far longer than those before them, under the same knobs."""

    holds, releases = 2, 2

    def __init__(self) -> None:
        self._new = NewSummaries()
        self._past = Past.of(NEWEST)

    def look(self, state: RunState, now_s: float) -> list[Finding] | None:
        share = limits_of(state).run
        new = self._new.take(state.summaries)
        for summary in new:
            self._past.add(summary.step_ms, summary.revision, share)
        if not new:
            return None
        risen = self._past.risen(share)
        if risen is None:
            return []
        now, usual = risen
        text = f"the run has slowed down: {now:.0f} ms a step, {usual:.0f} ms before"
        if share == SHARED_CORES.run:
            text += "; its ranks share cores, so another program on the machine may be the cause"
        evidence: dict[str, Value] = {"step_ms": round(now, 2), "usual_ms": round(usual, 2)}
        return [Finding("slowdown", "run", "warning", text, evidence)]
