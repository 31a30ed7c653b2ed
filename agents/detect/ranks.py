"""Ranks: gone, stuck, or slower than those that do the same."""

import math
from collections import defaultdict, deque

from agents.detect.finding import Finding, median, name_of, names_of, spread
from agents.state import RunState
from agents.wire import Pulse, Step, Value

STALL_S = 10.0  # in one operation,
STALL_STEPS = 5  # and as many typical steps, whichever is longer
SILENT_S = 4.0  # without a pulse, which comes each second from a thread of its own
AT_REST = ("paused", "starting", "snapshot", "place")  # operations that take as long as they take
WAITS = ("waiting", "reduce", "agree", "all-", "gather", "scatter", "broadcast", "barrier", "exchange")

SLOW = 0.15  # more time of its own than the median of its peers,
SLOW_SPREADS = 5.0  # and so many of their standard deviations,
SLOW_STEPS = 5  # over the median of so many steps
PEERS = 3  # fewer have no median to speak of


class Lost:
    """Ranks that fell silent or died without a goodbye; a process that is only suspended may yet be heard again."""

    holds, releases = 1, 1

    def look(self, state: RunState, now_s: float) -> list[Finding]:
        missing = _missing(state)
        over = [rank for rank in missing if state.gone[rank].over]
        silent = [rank for rank in missing if not state.gone[rank].over]
        return [
            *([self._finding(state, "lost", over)] if over else []),
            *([self._finding(state, "silent", silent)] if silent else []),
        ]

    def _finding(self, state: RunState, word: str, ranks: list[int]) -> Finding:
        first, last = state.gone[ranks[0]], state.steps.get(ranks[0])
        one = len(ranks) == 1
        why = f"{':' if one else f', rank {ranks[0]}:'} {first.text}" if first.text else ""
        text = f"{names_of(state, ranks)} {'is' if one else 'are'} {word}{why}"
        evidence: dict[str, Value] = {word: len(ranks), "last_step": last.step if last else None}
        return Finding(word, "run", "error", text, evidence, tuple(ranks))


def _missing(state: RunState) -> list[int]:
    return sorted(rank for rank, gone in state.gone.items() if not gone.clean)


class Stall:
    """The run stands: which ranks wait, in what, and which of them others wait for."""

    holds, releases = 2, 1

    def __init__(self) -> None:
        self._told: dict[int, tuple[Pulse, float]] = {}

    def look(self, state: RunState, now_s: float) -> list[Finding]:
        here = {rank: pulse for rank, pulse in state.pulses.items() if rank not in state.gone}
        for rank, pulse in here.items():
            if rank not in self._told or self._told[rank][0] is not pulse:
                self._told[rank] = (pulse, now_s)
        self._told = {rank: told for rank, told in self._told.items() if rank in here}
        silent = _missing(state) or sorted(
            rank for rank, (_, heard_s) in self._told.items() if now_s - heard_s > SILENT_S
        )
        usual_s = state.summaries[-1].step_ms / 1000 if state.summaries else math.inf
        limit_s = max(STALL_S, STALL_STEPS * usual_s)
        stuck = {
            rank: pulse
            for rank, pulse in here.items()
            if pulse.since_ms / 1000 + now_s - self._told[rank][1] > limit_s
            and not pulse.doing.startswith(AT_REST)
        }
        if not stuck:
            return []
        late = silent or _not_arrived(stuck)
        waiting = {rank: pulse for rank, pulse in stuck.items() if rank not in late}
        shown = next(iter(waiting.values() or stuck.values()))
        parts = [f"the run stands at step {shown.step}"]
        if waiting:
            parts.append(f"{len(waiting)} of {state.world} ranks {_in(shown.doing)}")
        late_at = state.pulses.get(late[0], shown)
        why = "not heard, at last" if silent else "not arrived:"
        parts.append(f"{names_of(state, late)} {why} in {late_at.doing or 'an unnamed operation'}")
        evidence: dict[str, Value] = {
            "limit_s": round(limit_s, 1),
            "waiting": len(waiting),
            "silent": len(silent),
            "doing": late_at.doing[:256],
        }
        return [Finding("stall", "run", "error", "; ".join(parts), evidence, tuple(late))]


def _not_arrived(stuck: dict[int, Pulse]) -> list[int]:
    """Of ranks that stand, those that the others wait for: an earlier step; else not in a collective; else in the
    operation that fewest are in."""
    first = min(pulse.step for pulse in stuck.values())
    if any(pulse.step != first for pulse in stuck.values()):
        return sorted(rank for rank, pulse in stuck.items() if pulse.step == first)
    busy = sorted(rank for rank, pulse in stuck.items() if not _waits(pulse.doing))
    if busy and len(busy) < len(stuck):
        return busy
    by_doing: defaultdict[str, list[int]] = defaultdict(list)
    for rank, pulse in stuck.items():
        by_doing[pulse.doing].append(rank)
    fewest: list[int] = sorted(by_doing.values(), key=len)[0]
    return sorted(fewest)


def _in(doing: str) -> str:
    return doing.replace("waiting", "wait", 1) if doing.startswith("waiting") else f"wait in {doing}"


def _waits(doing: str) -> bool:
    """Whether it names a collective, such as ``tp all-gather, layer 2``, or a wait in so many words."""
    return any(word in doing for word in WAITS)


class Straggler:
    """A rank that takes longer for its own work than its peers, which have the same stage and so the same work.

    Its own work is the step less what it waited in collectives: everybody's step takes as long as the slowest's.
    Ranks that share cores are slow by turns, and are not judged.
    """

    holds, releases = 3, 3

    def __init__(self) -> None:
        self._own: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SLOW_STEPS))
        self._last: dict[int, int] = {}

    def look(self, state: RunState, now_s: float) -> list[Finding] | None:
        if not state.summaries or state.summaries[-1].oversubscribed or not self._take(state):
            return None
        groups: defaultdict[object, dict[int, float]] = defaultdict(dict)
        for rank, own in self._own.items():
            hello = state.hellos.get(rank)
            if hello and rank not in state.gone and len(own) == SLOW_STEPS:
                groups[(hello.coords.get("pp"), hello.device)][rank] = median(own)
        return [finding for peers in groups.values() for finding in self._among(state, peers)]

    def _take(self, state: RunState) -> bool:
        """Take the records that are new; False if there are none."""
        new = [step for rank, step in state.steps.items() if self._last.get(rank) != step.step]
        for step in new:
            self._last[step.rank] = step.step
            self._own[step.rank].append(_own_ms(step))
        return bool(new)

    def _among(self, state: RunState, peers: dict[int, float]) -> list[Finding]:
        if len(peers) < PEERS:
            return []
        usual = median(peers.values())
        if not usual > 0:
            return []  # most do nothing but wait: no share of that can be told
        margin = max(SLOW * usual, SLOW_SPREADS * spread(list(peers.values()), usual))
        slow = [rank for rank, own in peers.items() if own > usual + margin]
        return [
            Finding(
                "straggler",
                f"rank {rank}",
                "warning",
                f"{name_of(state, rank)} needs {peers[rank]:.0f} ms of its own a step, "
                f"{peers[rank] / usual - 1:+.0%} against the {len(peers) - 1} ranks with the same work",
                {"own_ms": round(peers[rank], 2), "peers_ms": round(usual, 2), "peers": len(peers) - 1},
                (rank,),
            )
            for rank in slow
        ]


def _own_ms(step: Step) -> float:
    return max(0.0, step.step_ms - sum(traffic.exposed_ms for traffic in step.comm.values()))
