"""Pipeline schedules as lists of actions, and a clock that runs them: the bubble a schedule cannot avoid.

An action is F (forward), B (backward), or B's two parts where a schedule runs them apart: I (input gradients, what the
stage before waits for) and W (weight gradients, which nobody waits for). Stage s may run F of a micro-batch once stage
s - 1 has, and B or I once stage s + 1 has (the last stage: once it has run F itself).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from engine.planner.stages import SCHEDULES


class Act(NamedTuple):
    kind: str
    stage: int
    micro_batch: int


Turn = tuple[Act, ...]
"""Actions that a rank runs one after the other and whose outputs leave together, when all are done."""


def order(name: str, rank: int, ranks: int, virtual_stages: int, micro_batches: int) -> list[Turn]:
    """What `rank` runs under the schedule `name`, in order."""
    return [turn for turn in _ORDERS[name](rank, ranks, virtual_stages, micro_batches) if turn]


def _gpipe(rank: int, p: int, v: int, m: int) -> list[Turn]:
    """All forwards, then all backwards (Huang et al. 2019)."""
    return [(Act(kind, rank, n),) for kind in "FB" for n in range(m)]


def _1f1b(rank: int, p: int, v: int, m: int) -> list[Turn]:
    """One forward, one backward, once the stages after this one are filled (Narayanan et al. 2019)."""
    warm_up = min(m, p - rank)
    turns: list[Turn] = [(Act("F", rank, n),) for n in range(warm_up)]
    for n in range(m):
        turns.append((Act("B", rank, n),))
        turns += [(Act("F", rank, n + warm_up),)] * (n + warm_up < m)
    return turns


def _interleaved(rank: int, p: int, v: int, m: int) -> list[Turn]:
    """Depth first over a rank's stages, in rounds of about p micro-batches (Narayanan et al. 2021)."""
    per_round = m // max(1, m // p)
    turns: list[Turn] = []
    seen: Counter[tuple[str, int]] = Counter()

    def run(kind: str, stage: int) -> None:
        turns.append((Act(kind, stage, seen[kind, stage]),))
        seen[kind, stage] += 1

    warm_up = min((v - 1) * per_round + 2 * (p - 1 - rank), v * m)
    for n in range(v * m + warm_up):
        if n < v * m:
            run("F", n // per_round % v * p + rank)
        if n >= warm_up:
            run("B", (v - 1 - (n - warm_up) // per_round % v) * p + rank)
    return turns


_ORDERS: dict[str, Callable[[int, int, int, int], list[Turn]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
}
assert _ORDERS.keys() == SCHEDULES.keys()


class Clock:
    """A schedule over all ranks, to be run with any durations: nothing else costs time, and messages arrive at once."""

    def __init__(self, name: str, ranks: int, virtual_stages: int, micro_batches: int):
        turns = [order(name, rank, ranks, virtual_stages, micro_batches) for rank in range(ranks)]
        self.acts = [[act for turn in its for act in turn] for its in turns]
        self._end = ranks * virtual_stages - 1
        self._runs = self._sorted(turns)

    def idle(self, durations: Sequence[Sequence[float]]) -> tuple[float, list[float]]:
        """The window until the last rank has finished, and the time in it in which each rank runs nothing.

        `durations` are those of `acts`, rank by rank.
        """
        clock = [0.0] * len(self.acts)
        ends: list[float] = []
        for rank, position, after in self._runs:
            start = clock[rank]
            if after >= 0 and ends[after] > start:
                start = ends[after]
            clock[rank] = start + durations[rank][position]
            ends.append(clock[rank])
        window = max(clock)
        return window, [window - sum(its) for its in durations]

    def bubble(self, costs: Mapping[str, Sequence[float]]) -> float:
        """Mean share of the window in which a rank idles, 0..1, when an action of `kind` takes stage s
        `costs[kind][s]`, in any unit.

        For balanced stages of GPipe, 1F1B and interleaved: (p - 1) / (m v + p - 1) (Narayanan et al. 2021).
        """
        window, idle = self.idle([[costs[act.kind][act.stage] for act in its] for its in self.acts])
        return sum(idle) / len(idle) / window if window else 0.0

    def _sorted(self, turns: list[list[Turn]]) -> list[tuple[int, int, int]]:
        """(rank, position in its acts, number of the run on another rank whose output it needs, or -1), each after
        what it needs."""
        runs: list[tuple[int, int, int]] = []
        sent: dict[Act, int] = {}
        queues = [list(reversed(its)) for its in turns]
        positions = [0] * len(turns)
        mine = [{act.stage for act in acts} for acts in self.acts]
        while any(queues):
            before = len(runs)
            for rank, queue in enumerate(queues):
                while queue:
                    needs = [self._need(act) for act in queue[-1]]
                    needs = [None if need and need.stage in mine[rank] else need for need in needs]
                    if any(need and need not in sent for need in needs):
                        break
                    turn = queue.pop()
                    for need in needs:
                        runs.append((rank, positions[rank], sent[need] if need else -1))
                        positions[rank] += 1
                    sent |= {_output(act): len(runs) - 1 for act in turn}
            assert len(runs) > before, "the schedule waits for itself"
        return runs

    def _need(self, act: Act) -> Act | None:
        """The output of another stage that `act` starts from."""
        if act.kind == "F":
            return Act("F", act.stage - 1, act.micro_batch) if act.stage else None
        if act.kind == "W" or act.stage == self._end:
            return None
        return Act("B", act.stage + 1, act.micro_batch)


def _output(act: Act) -> Act:
    """An input gradient leaves alike whether or not the weights' are done too."""
    return act._replace(kind="B") if act.kind == "I" else act
