"""Detectors for stragglers (a rank is slower than its peers) and slowdowns (the run is slower than in its recent
steps).

The straggler detector compares the ranks' own times: the step time without the time spent waiting for other ranks.
Collectives make the step time equal on all ranks, so the step time does not show which rank is slow.
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agents.alerts.expert_work import ExpertWork
from agents.alerts.finding import Finding, NewSummaries, median, name_of, peer_baseline, spread
from agents.protocol import Value
from agents.state.run_state import RunState

NUMBER = re.compile(r"\Acuda:\d+ ?")  # the CUDA number at the start of a device name
SPREADS = 5.0  # a rank is a straggler if it is this many standard deviations above its peers' median
RELEASE = 0.5  # factor on the limits: a rank counts as a straggler until it is below the reduced limits
# In standard deviations of single values; the median of several values varies about half as much.
BASELINE_SPREADS = 3.0
USUAL = 32  # number of values in the baseline
ENOUGH = 8
LOAD_NAMED = 0.05  # share of a rank's time above which the load of its experts is named
NEWEST = 5  # number of newest steps whose median is compared with the baseline


@dataclass(frozen=True)
class Limits:
    """Thresholds: the number of records to average, and the fraction by which a time must exceed its reference to count
    as slow.
    """

    records: int
    peers: float  # excess over the median of several peers
    pair: float  # excess over a single peer or the rank's own baseline, which are less certain than a median
    run: float  # excess of the run's step time over its baseline


OWN_CORES = Limits(records=5, peers=0.15, pair=0.3, run=0.25)
# Higher, because ranks that share cores are all slow at times.
SHARED_CORES = Limits(records=15, peers=0.3, pair=0.6, run=0.5)


def limits_of(state: RunState) -> Limits:
    shared = bool(state.summaries) and state.summaries[-1].oversubscribed
    return SHARED_CORES if shared else OWN_CORES


@dataclass
class Baseline:
    """The times of the newest steps, and those of earlier steps since the last knob change, which serve as the
    baseline."""

    newest: deque[float]
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL))
    revision: int | None = None

    @classmethod
    def of(cls, newest: int) -> "Baseline":
        return cls(deque(maxlen=newest))

    def add(self, value: float, revision: int, share: float) -> None:
        """Add the time of a new step. A new knob revision clears the baseline, because knobs change how long steps
        usually take."""
        if revision != self.revision:
            self.revision = revision
            self.newest.clear()
            self.usual.clear()
        if len(self.newest) == self.newest.maxlen and not self._is_far(self.newest[0], share):
            self.usual.append(self.newest[0])  # outliers stay out of the baseline
        self.newest.append(value)

    def increase(self, share: float) -> tuple[float, float] | None:
        """The median of the newest values and the median of the baseline; None unless the newest values are
        significantly higher.
        """
        if len(self.newest) < (self.newest.maxlen or 0):
            return None
        now = median(self.newest)
        return (now, median(self.usual)) if self._is_far(now, share) else None

    def first_high(self, share: float) -> int:
        """The position in `newest` of the oldest value far above the baseline, where 1 is the last value, 2 the one
        before it, and so on; also 1 if no value is so high."""
        return _first(self.newest, lambda value: self._is_far(value, share))

    def _is_far(self, value: float, share: float) -> bool:
        if len(self.usual) < ENOUGH:
            return False
        usual = median(self.usual)
        return usual > 0 and value > usual + max(
            share * usual, BASELINE_SPREADS * spread(list(self.usual), usual)
        )


def _first(values: Iterable[float], high: Callable[[float], bool]) -> int:
    """The position in `values` of the first value for which `high` is true, where 1 is the last value, 2 the one before
    it, and so on; also 1 if there is no such value."""
    flags = [high(value) for value in values]
    return len(flags) - flags.index(True) if True in flags else 1


class Straggler:
    """Detects a rank whose own time (step time without waiting) is longer than that of its peers. Peers have the same
    pipeline stage and device type, so their work differs only in the load of their experts (`ExpertWork`). A rank
    without peers is compared with its own baseline."""

    holds, releases = 3, 3

    def __init__(self) -> None:
        self._own: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SHARED_CORES.records))
        self._steps: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=SHARED_CORES.records))
        self._baselines: defaultdict[int, Baseline] = defaultdict(lambda: Baseline.of(OWN_CORES.records))
        self._last: dict[int, int] = {}
        self._slow: set[int] = set()  # ranks that were slower than their peers at the last check

    def check(self, state: RunState, now_s: float) -> list[Finding] | None:
        limits = limits_of(state)
        groups: defaultdict[object, list[int]] = defaultdict(list)
        for rank, hello in state.hellos.items():
            if rank not in state.gone:
                groups[hello.coords.get("pp"), _kind(hello.device)].append(rank)
        alone = {ranks[0] for ranks in groups.values() if len(ranks) == 1}
        if not self._take(state, alone, limits):
            return None
        findings = self._against_own_baseline(state, alone, limits)
        for ranks in groups.values():
            findings += self._against_peers(state, [rank for rank in ranks if rank not in alone], limits)
        return findings

    def _take(self, state: RunState, alone: set[int], limits: Limits) -> bool:
        """Add the ranks' newest step records to the detector's history; returns False if no rank has sent a new one."""
        new = [step for rank, step in state.steps.items() if self._last.get(rank) != step.step]
        for step in new:
            self._last[step.rank] = step.step
            self._own[step.rank].append(step.own_ms)
            self._steps[step.rank].append(step.step)
            if step.rank in alone:
                self._baselines[step.rank].add(step.own_ms, step.revision, limits.pair)
        return bool(new)

    def _against_peers(self, state: RunState, ranks: list[int], limits: Limits) -> list[Finding]:
        known = {rank: list(self._own[rank])[-limits.records :] for rank in ranks}
        own = {rank: median(values) for rank, values in known.items() if len(values) == limits.records}
        if len(own) < 2:
            return []
        share = limits.pair if len(own) == 2 else limits.peers
        usual = peer_baseline(own)
        # The spread of two values is not meaningful.
        noise = spread(list(own.values()), median(own.values())) if len(own) > 2 else 0.0
        work = ExpertWork(state, own)
        slow: dict[int, float] = {}  # rank -> the time that is expected of it
        for rank in own:  # there is no ratio if the reference is zero (the peers only wait)
            factor = RELEASE if rank in self._slow else 1.0
            if (
                usual[rank] > 0
                and own[rank] - usual[rank] > max(share * usual[rank], SPREADS * noise) * factor
                and own[rank] > (1.0 + share * factor) * (expected := work.expected(rank, usual[rank]))
            ):
                slow[rank] = expected if expected > (1.0 + LOAD_NAMED) * usual[rank] else usual[rank]
        self._slow = (self._slow - set(own)) | set(slow)
        others = "the other rank" if len(own) == 2 else f"the {len(own) - 1} ranks"
        return [
            self._finding(
                *(state, rank, own[rank], expected),
                f"{others} with the same work"
                if expected == usual[rank]
                else f"the {expected:.0f} ms expected for the load of its experts",
                *(len(own) - 1, self._began(rank, (1.0 + share) * expected, limits)),
            )
            for rank, expected in slow.items()
        ]

    def _began(self, rank: int, limit_ms: float, limits: Limits) -> int:
        """The first of the averaged steps in which the rank's own time was above the limit; if there is no such step,
        the newest step."""
        newest = list(self._own[rank])[-limits.records :]
        return self._steps[rank][-_first(newest, lambda value: value > limit_ms)]

    def _against_own_baseline(self, state: RunState, alone: set[int], limits: Limits) -> list[Finding]:
        increase = {
            rank: found for rank in sorted(alone) if (found := self._baselines[rank].increase(limits.pair))
        }
        if len(increase) == len(alone):
            return []  # if all ranks are slower, the run has slowed down, which `Slowdown` reports
        return [
            self._finding(
                *(state, rank, now, usual, f"its own {usual:.0f} ms before", 0),
                self._steps[rank][-self._baselines[rank].first_high(limits.pair)],
            )
            for rank, (now, usual) in increase.items()
        ]

    def _finding(
        self, state: RunState, rank: int, own: float, usual: float, compared_to: str, peers: int, began: int
    ) -> Finding:
        excess = f"{100 * (own / usual - 1):+.0f} % against {compared_to}"
        text = f"{name_of(state, rank)} has an own time of {own:.0f} ms a step, {excess}"
        evidence: dict[str, Value] = {"own_ms": round(own, 2), "peers_ms": round(usual, 2), "peers": peers}
        return Finding("straggler", f"rank {rank}", "warning", text, evidence, (rank,), began)


def _kind(device: str) -> str:
    """The device type in a rank's hello, such as ``NVIDIA H100`` in ``cuda:3 NVIDIA H100``; "" if the hello has only a
    number or a UUID.
    """
    if device.isdecimal() or device.startswith(("GPU-", "MIG-")):
        return ""
    return NUMBER.sub("", device)


class Slowdown:
    """Detects that steps take much longer than earlier steps with the same knob values."""

    holds, releases = 2, 2

    def __init__(self) -> None:
        self._new = NewSummaries()
        self._baseline = Baseline.of(NEWEST)
        self._steps: deque[int] = deque(maxlen=NEWEST)

    def check(self, state: RunState, now_s: float) -> list[Finding] | None:
        share = limits_of(state).run
        new = self._new.take(state.summaries)
        for summary in new:
            self._baseline.add(summary.step_ms, summary.revision, share)
            self._steps.append(summary.step)
        if not new:
            return None
        increase = self._baseline.increase(share)
        if increase is None:
            return []
        now, usual = increase
        text = f"the run has slowed down: {now:.0f} ms a step, {usual:.0f} ms before"
        if share == SHARED_CORES.run:
            text += "; its ranks share cores, so another program on the machine may be the cause"
        evidence: dict[str, Value] = {"step_ms": round(now, 2), "usual_ms": round(usual, 2)}
        began = self._steps[-self._baseline.first_high(share)]
        return [Finding("slowdown", "run", "warning", text, evidence, began=began)]
