"""Pipeline schedules (GPipe, 1F1B, interleaved, zero-bubble, DualPipeV) as lists of actions, and a simulation that
gives the idle time of a schedule.

An action is F (forward) or B (backward). A split backward pass has two actions: I (input gradients, which the previous
stage needs) and W (weight gradients, which no stage needs). For each micro-batch, stage s can run F after stage s - 1
has run F, and B or I after stage s + 1 has run B or I. The last stage can run B or I after its own F.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config.schedule_traits import SCHEDULES


class Act(NamedTuple):
    kind: str
    stage: int
    micro_batch: int


Turn = tuple[Act, ...]
"""Actions that a rank runs one after the other; their outputs are sent together when all are done."""


def action_order(name: str, rank: int, ranks: int, virtual_stages: int, micro_batches: int) -> list[Turn]:
    """The actions of `rank` in the schedule `name`, in execution order. Actions whose outputs are sent together form
    one `Turn`; only DualPipeV has turns of more than one action."""
    return _ORDERS[name](rank, ranks, virtual_stages, micro_batches)


class _Acts:
    """Builds a rank's list of turns (groups of actions whose outputs are sent together). The actions of one kind on one
    stage are in the order of their micro-batches."""

    def __init__(self, micro_batches: int | None = None):
        self.turns: list[Turn] = []
        self.seen: Counter[tuple[str, int]] = Counter()
        self._most = micro_batches

    def run(self, kinds: str, stage: int) -> None:
        for kind in kinds:
            self._add(self._next(kind, stage))

    def together(self, kind: str, stage: int, then: str, there: int) -> None:
        self._add(self._next(kind, stage), self._next(then, there))

    def _next(self, kind: str, stage: int) -> Act:
        part = "I" if kind == "B" else kind
        act = Act(kind, stage, self.seen[part, stage])
        for done in "IW" if kind == "B" else kind:
            self.seen[done, stage] += 1
        return act

    def _add(self, *acts: Act) -> None:
        if self._most is None or acts[0].micro_batch < self._most:
            self.turns.append(acts)


def _gpipe(rank: int, p: int, v: int, m: int) -> list[Turn]:
    """The GPipe schedule: all forward passes, then all backward passes (Huang et al. 2019)."""
    return [(Act(kind, rank, n),) for kind in "FB" for n in range(m)]


def _1f1b(rank: int, p: int, v: int, m: int) -> list[Turn]:
    """The 1F1B schedule: warm-up forward passes until the later stages are filled, then alternating backward and
    forward passes (Narayanan et al. 2019)."""
    warm_up = min(m, p - rank)
    turns: list[Turn] = [(Act("F", rank, n),) for n in range(warm_up)]
    for n in range(m):
        turns.append((Act("B", rank, n),))
        turns += [(Act("F", rank, n + warm_up),)] * (n + warm_up < m)
    return turns


def _interleaved(rank: int, p: int, v: int, m: int) -> list[Turn]:
    """The interleaved schedule (Narayanan et al. 2021). Each rank has several stages, and runs about p micro-batches on
    one stage before it goes on to its next stage."""
    return _in_rounds(rank, p, v, m, hop=2, backward="B")


def _interleaved_zb(rank: int, p: int, v: int, m: int) -> list[Turn]:
    """The interleaved schedule with a split backward pass. Rank r computes the weight gradients of a micro-batch only
    after r more input-gradient actions, so that weight gradients fill the bubble at the end (ZB1P of Qi et al.
    2023)."""
    return _in_rounds(rank, p, v, m, hop=1, backward="I")


def _in_rounds(rank: int, p: int, v: int, m: int, hop: int, backward: str) -> list[Turn]:
    per_round = m // max(1, m // p)
    acts = _Acts()
    warm_up = min((v - 1) * per_round + hop * (p - 1 - rank), v * m)
    stages = [(v - 1 - n // per_round % v) * p + rank for n in range(v * m)]  # of backward actions
    for n in range(v * m + warm_up):
        if n < v * m:
            acts.run("F", n // per_round % v * p + rank)
        if n >= warm_up:
            acts.run(backward, stages[n - warm_up])
            if backward == "I" and n - warm_up >= rank:
                acts.run("W", stages[n - warm_up - rank])
    if backward == "I":
        for stage in stages[max(0, v * m - rank) :]:
            acts.run("W", stage)
    return acts.turns


def _zbv(rank: int, p: int, v: int, m: int) -> list[Turn]:
    """The ZB-V schedule (Qi et al. 2023, section 6): two stages per rank in a V, so that rank 0 has the first and the
    last stage, and a split backward pass. There is no bubble if F, I and W take equal times. For fewer than 2 p - 1
    micro-batches, the order for 2 p - 1 micro-batches is used, and the actions of micro-batches m and above are left
    out."""
    acts, n = _Acts(m), max(2 * p - 1, m)
    down, up = rank, 2 * p - 1 - rank
    acts.run("F" * (2 * (p - rank) - 1), down)
    for _ in range(rank):
        acts.run("F", up)
        acts.run("F", down)
    for _ in range(p - rank):
        acts.run("FIW", up)
    while acts.seen["F", up] < acts.seen["F", down] or acts.seen["F", down] < n:
        acts.run("FIW" if acts.seen["F", down] < n else "IW", down)
        acts.run("FIW", up)
    for _ in range(rank):
        acts.run("I", down)
        acts.run("I", up)
    for _ in range(p - rank):
        acts.run("IW", down)
    for stage in (up, down):
        acts.run("W" * (acts.seen["I", stage] - acts.seen["W", stage]), stage)
    return acts.turns


def _dualpipev(rank: int, p: int, v: int, m: int) -> list[Turn]:
    """The DualPipeV schedule (half of DualPipe, DeepSeek-AI 2024): two stages per rank in a V, so that rank 0 has the
    first and the last stage. In the steady state, a rank runs the forward pass of one of its stages and then the
    backward pass of the other, and sends the outputs of both together."""
    acts = _Acts()
    down, up = rank, 2 * p - 1 - rank
    late: list[int] = []  # stages whose weight gradients are pending, oldest first

    def input_gradient(stage: int) -> None:
        acts.run("I", stage)
        late.append(stage)

    def weight_gradient() -> None:
        if late:
            acts.run("W", late.pop(0))

    acts.run("F" * (2 * (p - rank - 1)), down)
    for _ in range(rank + 1):
        acts.run("F", down)
        acts.run("F", up)
    for _ in range(p - rank - 1):
        input_gradient(up)
        weight_gradient()
        acts.run("F", up)
    for n in range(m - 2 * p + rank + 1):
        if n == 0 and rank == p - 1:  # two separate turns make the bubble smaller
            acts.run("F", down)
            acts.run("B", up)
        else:
            acts.together("F", down, "B", up)
        acts.together("F", up, "B", down)
    for _ in range(p - rank - 1):
        acts.run("B", up)
        acts.together("F", up, "B", down)
    half = (rank + 1) // 2
    split = False
    for n in range(rank + 1):
        for stage in (up, down):
            split = split or (n == half and stage == (up if rank % 2 else down))
            (input_gradient if split else partial(acts.run, "B"))(stage)
    for _ in range(p - rank - 1):
        weight_gradient()
        (input_gradient if split else partial(acts.run, "B"))(down)
    while late:
        weight_gradient()
    return acts.turns


_ORDERS: dict[str, Callable[[int, int, int, int], list[Turn]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "interleaved_zb": _interleaved_zb,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
assert _ORDERS.keys() == SCHEDULES.keys()


class ScheduleClock:
    """Simulates a schedule over all ranks from the durations of actions. Messages take no time in the simulation."""

    def __init__(self, name: str, ranks: int, virtual_stages: int, micro_batches: int):
        turns = [action_order(name, rank, ranks, virtual_stages, micro_batches) for rank in range(ranks)]
        self.acts = [[act for turn in rank_turns for act in turn] for rank_turns in turns]
        self._end = ranks * virtual_stages - 1
        self._runs = self._sorted(turns)

    def idle(self, durations: Sequence[Sequence[float]]) -> tuple[float, list[float]]:
        """The time until the last rank has finished, and for how long each rank is idle until then.

        `durations` contains the duration of each action in `acts`, by rank.
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
        return window, [window - sum(busy) for busy in durations]

    def ends(self, durations: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
        """The time at which each action ends, by rank, in the order of `acts`. `durations[rank]` has the shape [actions
        of the rank, simulations]. One call runs several independent simulations, such as one for each pipeline of a
        run."""
        cases = durations[0].shape[1]
        clock: list[NDArray[np.float64]] = [np.zeros(cases) for _ in self.acts]
        by_rank = [np.empty_like(own) for own in durations]
        ends: list[NDArray[np.float64]] = []
        for rank, position, after in self._runs:
            end = by_rank[rank][position]
            if after >= 0:
                np.maximum(clock[rank], ends[after], out=end)
                end += durations[rank][position]
            else:
                np.add(clock[rank], durations[rank][position], out=end)
            clock[rank] = end
            ends.append(end)
        return by_rank

    def bubble(self, costs: Mapping[str, Sequence[float] | Mapping[int, float]]) -> float:
        """A rank's idle time, divided by the time until the last rank has finished, and averaged over ranks.
        `costs[kind][s]` is the duration of an action on stage s, in any unit.

        With balanced stages, this fraction is (p - 1) / (m v + p - 1) for the GPipe, 1F1B and interleaved schedules
        with p ranks, v stages per rank and m micro-batches (Narayanan et al. 2021).
        """
        window, idle = self.idle([[costs[act.kind][act.stage] for act in acts] for acts in self.acts])
        return sum(idle) / len(idle) / window if window else 0.0

    def _sorted(self, turns: list[list[Turn]]) -> list[tuple[int, int, int]]:
        """All actions, sorted so that each action comes after the actions whose outputs it needs. Each entry is (rank,
        position in the rank's `acts`, `need`). If the action receives an input from another rank, `need` is the index,
        in the returned list, of the action after which that rank sends the input; else -1."""
        runs: list[tuple[int, int, int]] = []
        sent: dict[Act, int] = {}
        queues = [list(reversed(rank_turns)) for rank_turns in turns]
        positions = [0] * len(turns)
        stages = [{act.stage for act in acts} for acts in self.acts]
        while any(queues):
            before = len(runs)
            for rank, queue in enumerate(queues):
                while queue:
                    needs = [self._need(act) for act in queue[-1]]
                    needs = [None if need and need.stage in stages[rank] else need for need in needs]
                    if any(need and need not in sent for need in needs):
                        break
                    turn = queue.pop()
                    for need in needs:
                        runs.append((rank, positions[rank], sent[need] if need else -1))
                        positions[rank] += 1
                    sent |= {_output(act): len(runs) - 1 for act in turn}
            assert len(runs) > before, "deadlock in the schedule"
        return runs

    def _need(self, act: Act) -> Act | None:
        """The action on another stage that produces an input of `act`; None if there is none."""
        if act.kind == "F":
            return Act("F", act.stage - 1, act.micro_batch) if act.stage else None
        if act.kind == "W" or act.stage == self._end:
            return None
        return Act("B", act.stage + 1, act.micro_batch)


def _output(act: Act) -> Act:
    """The key of an action's output in `sent`. I and B send the same input gradient, so both use B as the kind in the
    key."""
    return act._replace(kind="B") if act.kind == "I" else act
