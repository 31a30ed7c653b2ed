"""Detectors for lost and absent ranks, and for stalled runs."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from agents.alerts.finding import Finding, median, names_of
from agents.protocol import Pulse, Value
from agents.state.run_state import RunState

STALL_S = 10.0  # a rank is stalled if one operation takes longer than this
STALL_STEPS = 5  # an operation must also take longer than this many typical steps
ABSENT_S = 20.0  # the ranks of a job join at different times; after this long, the next rank does not come
SILENT_S = 4.0  # a rank is silent after this long without a pulse; its agent sends one per second
# Work outside the steps, for which the other ranks may wait.
LONG_WORK = ("evaluation", "checkpoint", "expert placement")
# Operations that may take any time.
AT_REST = ("paused", "starting", "between exports", *LONG_WORK)
# Operations outside the steps of which nothing else is known: the program may do anything in them.
PAUSES = ("between steps", "between phases")
PAUSE_S = 1.0  # a pause between two steps is long, such as an evaluation, if it takes at least this long
TYPICAL_PAUSES = 10  # a pause must take longer than this many typical long pauses ...
# ... and than this; the second number applies while the run has made no long pause.
LEAST_PAUSE_S, UNKNOWN_PAUSE_S = 60.0, 600.0
WAITS = ("waiting", "reduce", "agree", "all-", "gather", "scatter", "broadcast", "barrier", "exchange")


# For each process state of a missing rank, the name of the alert and the words used in its sentence.
WORDS_BY_PROCESS = {
    "ended": ("lost", "lost"),
    "stopped": ("silent", "silent"),
    "alive": ("silent", "silent"),
    "unknown": ("unheard", "not heard"),
}


class Lost:
    """Detects ranks that stopped sending without telling the hub that they leave the run: `lost` if the process has
    ended, `silent` if the process still exists, `unheard` if the process runs on another host, where the hub cannot
    check it.
    """

    holds, releases = 1, 1

    def check(self, state: RunState, now_s: float) -> list[Finding]:
        missing: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for rank in _missing(state):
            missing[WORDS_BY_PROCESS[state.gone[rank].process]].append(rank)
        return [self._finding(state, *words_of, ranks) for words_of, ranks in missing.items()]

    def _finding(self, state: RunState, name: str, words: str, ranks: list[int]) -> Finding:
        first, last = state.gone[ranks[0]], state.steps.get(ranks[0])
        one = len(ranks) == 1
        why = f"{':' if one else f', rank {ranks[0]}:'} {first.text}" if first.text else ""
        text = f"{names_of(state, ranks)} {'is' if one else 'are'} {words}{why}"
        evidence: dict[str, Value] = {name: len(ranks), "last_step": last.step if last else None}
        return Finding(name, "run", "error", text, evidence, tuple(ranks))


class Absent:
    """Detects ranks that have never joined: the other ranks are there, and for `ABSENT_S` seconds no rank has
    followed them."""

    holds, releases = 1, 1

    def __init__(self) -> None:
        self._known, self._since_s = 0, 0.0

    def check(self, state: RunState, now_s: float) -> list[Finding]:
        here = len(state.hellos)
        if here != self._known:
            self._known, self._since_s = here, now_s
        over = all(rank in state.gone and state.gone[rank].over for rank in state.hellos)
        if here >= state.world or over or now_s - self._since_s < ABSENT_S:
            return []
        ranks = [rank for rank in range(state.world) if rank not in state.hellos]
        one = len(ranks) == 1
        text = f"{names_of(state, ranks)} {'has' if one else 'have'} not joined: {here} of {state.world} ranks are here"
        return [Finding("absent", "run", "error", text, {"absent": len(ranks)}, tuple(ranks))]


def _missing(state: RunState) -> list[int]:
    return sorted(
        rank for rank, gone in state.gone.items() if not gone.clean and gone.process != "restarting"
    )


class Stall:
    """Detects a run that makes no progress. The alert gives the number of waiting ranks, their operation, and the ranks
    that they wait for.
    """

    holds, releases = 2, 1

    def __init__(self) -> None:
        self._received: dict[int, tuple[Pulse, float]] = {}

    def check(self, state: RunState, now_s: float) -> list[Finding]:
        here = {rank: pulse for rank, pulse in state.pulses.items() if rank not in state.gone}
        for rank, pulse in here.items():
            if rank not in self._received or self._received[rank][0] is not pulse:
                self._received[rank] = (pulse, now_s)
        self._received = {rank: received for rank, received in self._received.items() if rank in here}
        silent = _missing(state) or sorted(
            rank for rank, (_, heard_s) in self._received.items() if now_s - heard_s > SILENT_S
        )
        usual_s = state.summaries[-1].step_ms / 1000 if state.summaries else math.inf
        limit_s = max(STALL_S, STALL_STEPS * usual_s)
        since_s = {
            rank: pulse.since_ms / 1000 + now_s - self._received[rank][1] for rank, pulse in here.items()
        }
        stuck = {
            rank: pulse
            for rank, pulse in here.items()
            if since_s[rank] > limit_s and not pulse.doing.startswith(AT_REST)
        }
        if stuck and _only_pause(stuck):
            limit_s = max(limit_s, _pause_limit_s(state))
            stuck = {rank: pulse for rank, pulse in stuck.items() if since_s[rank] > limit_s}
        if not stuck or _long_work(here, silent):
            return []
        missing = silent or _not_arrived(stuck)
        waiting = {rank: pulse for rank, pulse in stuck.items() if rank not in missing}
        shown = next(iter(waiting.values() or stuck.values()))
        parts = [f"the run is stuck at step {shown.step}"]
        if waiting:
            parts.append(f"{len(waiting)} of {state.world} ranks {_in(shown.doing)}")
        last_pulse = state.pulses.get(missing[0], shown)
        why = "not heard, last in" if silent else "not arrived: in"
        if not silent and not waiting:  # all stuck ranks are in the same operation
            why = "is in" if len(missing) == 1 else "are in"
        doing = last_pulse.doing or "an unnamed operation"
        if doing in PAUSES:
            why = why.removesuffix(" in")
        parts.append(f"{names_of(state, missing)} {why} {doing}")
        evidence: dict[str, Value] = {
            "limit_s": round(limit_s, 1),
            "waiting": len(waiting),
            "silent": len(silent),
            "doing": last_pulse.doing[:256],
        }
        return [Finding("stall", "run", "error", "; ".join(parts), evidence, tuple(missing))]


def _only_pause(stuck: dict[int, Pulse]) -> bool:
    """Whether all stalled ranks are outside a step, after the same step. If one of them is in a step or at another
    step, the others wait for it, or it waits for the others."""
    return (
        all(pulse.doing in PAUSES for pulse in stuck.values()) and len({p.step for p in stuck.values()}) == 1
    )


def _pause_limit_s(state: RunState) -> float:
    """The time after which a pause between two steps is too long."""
    ends = ((one.time_s, two.time_s - two.step_ms / 1000) for one, two in pairwise(state.summaries))
    long = [begin - end for end, begin in ends if begin - end >= PAUSE_S]
    return max(LEAST_PAUSE_S, TYPICAL_PAUSES * median(long)) if long else UNKNOWN_PAUSE_S


def _long_work(here: Mapping[int, Pulse], silent: Sequence[int]) -> bool:
    """Whether a rank does work for which the other ranks wait, as when only rank 0 evaluates or saves."""
    return any(pulse.doing.startswith(LONG_WORK) for rank, pulse in here.items() if rank not in silent)


def _not_arrived(stuck: dict[int, Pulse]) -> list[int]:
    """The stalled ranks that the others wait for: the ranks at the earliest step. If all ranks are at the same step,
    the ranks that are not in a collective. If all of them or none are in a collective, the smallest group of ranks
    that are in the same operation.
    """
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
    if doing in PAUSES:
        return f"wait {doing}"
    return doing.replace("waiting", "wait", 1) if doing.startswith("waiting") else f"wait in {doing}"


def _waits(doing: str) -> bool:
    """Whether the operation waits for other ranks; a collective such as ``tp all-gather, layer 2`` does."""
    return any(word in doing for word in WAITS)
