"""The times of steps by stage and phase: a compact record for many steps, and the values of every rank for some of
these steps. A step is added when a rank reports the second step after it, so that late ranks are included.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agents.protocol import Step
from cockpit.data.history.kept_steps import KeptSteps
from cockpit.data.history.rank_values import ArrivingStep, ByRank
from cockpit.data.history.ranks import Gather

STEPS, NEWEST, SLOWEST = 512, 128, 16
BY_RANK_STEPS, BY_RANK_NEWEST, BY_RANK_SLOWEST = 64, 16, 8
BY_RANK_BYTES = 16 << 20
# With more ranks than this, fewer steps are added: a step of 16,384 ranks costs about 0.1 s.
EVERY_RANKS = 2048
LATE = 2  # a step is added when a rank has reported the step that is this many later


class Spread(NamedTuple):
    """The median and the highest value of a quantity, such as the step time or the time of a phase, over the ranks of a
    pipeline stage. If no rank reported the quantity, the values are NaN and `rank` is -1."""

    median: float  # with two ranks, the lower value
    worst: float  # the highest
    rank: int  # the rank with the highest

    @property
    def known(self) -> bool:
        return self.rank >= 0


@dataclass(frozen=True)
class StepPhases:
    """One step: for each quantity and pipeline stage, the median and the highest value over the stage's ranks."""

    step: int
    revision: int
    step_ms: float  # step time of the slowest rank
    ranks: int  # number of ranks with a record of the step
    stages: tuple[int, ...]
    # By quantity: the median, worst value and worst rank of each stage, one stage after another.
    spreads: Mapping[str, "array[float]"]

    def spread(self, quantity: str, stage: int) -> Spread:
        values = self.spreads.get(quantity)
        if values is None or stage not in self.stages:
            return Spread(math.nan, math.nan, -1)
        at = 3 * self.stages.index(stage)
        return Spread(values[at], values[at + 1], int(values[at + 2]))


class Phases:
    """For a limited number of a run's steps, the times that the ranks reported (such as the step time and its phases),
    by pipeline stage and, for some of these steps, by rank. `stage_of(rank)`: the pipeline coordinate of a rank."""

    def __init__(self, stage_of: Callable[[int], int]) -> None:
        self._stage_of = stage_of
        self._kept: KeptSteps[StepPhases] = KeptSteps(self._time, STEPS, NEWEST, SLOWEST)
        self._by_rank: KeptSteps[ByRank] = KeptSteps(
            self._time, BY_RANK_STEPS, BY_RANK_NEWEST, BY_RANK_SLOWEST, BY_RANK_BYTES
        )
        self._arriving: dict[int, ArrivingStep] = {}  # steps not added yet
        self._taken = -1  # newest step that was added
        self._last: dict[int, int] = {}  # newest step of each rank
        self._turn = 0
        self.thinned = False  # whether steps were left out because there are many ranks
        self.revision = 0  # increases whenever a step is added or removed

    def copy(self, stage_of: Callable[[int], int]) -> "Phases":
        """A copy that does not change when records are added to the original."""
        still = Phases(stage_of)
        still._kept, still._by_rank = self._kept.copy(still._time), self._by_rank.copy(still._time)
        still._arriving = {step: arriving.copy() for step, arriving in self._arriving.items()}
        still._taken, still._last, still._turn = self._taken, self._last.copy(), self._turn
        still.thinned, still.revision = self.thinned, self.revision
        return still

    def note(self, records: Iterable[Step]) -> None:
        """Add records. A step number lower than a rank's last step means that the run was resumed; later steps are then
        removed.
        """
        groups: dict[int, list[Step]] = {}
        for record in records:
            rank, step = record.rank, record.step
            if step < self._last.get(rank, -1):
                self._add(groups)
                self.cut(step)
            self._last[rank] = step
            if step <= self._taken:
                continue  # too late to be included
            if step not in self._arriving:
                self._add(groups)
                self._arriving[step] = ArrivingStep()
                for done in sorted(one for one in self._arriving if one <= step - LATE):
                    self._take(done, self._arriving.pop(done))
            groups.setdefault(step, []).append(record)
        self._add(groups)

    def _add(self, groups: dict[int, list[Step]]) -> None:
        """Add the records in `groups` to the steps whose records are still arriving, and empty `groups`."""
        for step, group in groups.items():
            if step in self._arriving:
                self._arriving[step].add(group)
        groups.clear()

    def cut(self, step: int) -> None:
        """Remove `step` and all later steps."""
        self._kept.cut(step)
        self._by_rank.cut(step)
        self._arriving = {one: arriving for one, arriving in self._arriving.items() if one < step}
        self._last = {rank: last for rank, last in self._last.items() if last < step}
        self._taken = min(self._taken, step - 1)
        self.revision += 1

    def recent(self, step: int) -> tuple[StepPhases, ByRank] | None:
        """The values of a step whose records are still arriving, from the records received so far; None if there are
        none."""
        arriving = self._arriving.get(step)
        return self._values(step, arriving) if arriving else None

    @property
    def steps(self) -> list[int]:
        """The steps whose times are kept, ascending."""
        return self._kept.steps

    @property
    def dropped(self) -> int:
        """Number of steps that were dropped to make room."""
        return self._kept.dropped

    def get(self, step: int | None) -> StepPhases | None:
        return self._kept.get(step)

    def by_rank(self, step: int | None) -> ByRank | None:
        return self._by_rank.get(step)

    def slowest(self) -> int | None:
        """Of the steps whose times are kept, the one with the longest step time, ignoring the run's first step, which
        is always slow."""
        return max((step for step in self._kept if step > 0), key=self._time, default=None)

    def time_ms(self, step: int) -> float | None:
        """The step time of the slowest rank in `step`; None if the times of this step are not kept."""
        kept = self._kept.get(step)
        return kept.step_ms if kept else None

    def _time(self, step: int) -> float:
        return self.time_ms(step) or 0.0

    def _take(self, step: int, arrived: ArrivingStep) -> None:
        self._taken = step
        if len(arrived) > EVERY_RANKS:
            self._turn += 1
            slow = sorted(map(self._time, self._kept), reverse=True)[:SLOWEST]
            due = self._turn % -(-len(arrived) // EVERY_RANKS) == 0
            if not due and len(slow) == SLOWEST and arrived.step_ms <= slow[-1]:
                self.thinned = True
                return
        phases, by_rank = self._values(step, arrived)
        self._kept.add(step, phases)
        self._by_rank.add(step, by_rank, sum(4 * len(values) for values in by_rank.values.values()))
        self.revision += 1

    def _values(self, step: int, arrived: ArrivingStep) -> tuple[StepPhases, ByRank]:
        by_rank = arrived.by_rank()
        return phases_of(step, arrived.revision, arrived.step_ms, by_rank, self._stage_of), by_rank


def phases_of(
    step: int, revision: int, step_ms: float, by_rank: ByRank, stage_of: Callable[[int], int]
) -> StepPhases:
    """For one step, the median and the highest value of each quantity over the ranks of each pipeline stage."""
    places: dict[int, list[int]] = {}
    for at, rank in enumerate(by_rank.ranks):
        places.setdefault(stage_of(rank), []).append(at)
    gather = {stage: Gather(at) for stage, at in places.items()}
    spreads: dict[str, array[float]] = {}
    for name, values in by_rank.values.items():
        flat = array("d")
        for stage in sorted(places):
            flat.extend(_spread(by_rank.ranks, places[stage], gather[stage](values)))
        spreads[name] = flat
    return StepPhases(step, revision, step_ms, len(by_rank.ranks), tuple(sorted(places)), spreads)


def _spread(ranks: Sequence[int], places: Sequence[int], found: Sequence[float]) -> Spread:
    """The median and the highest value of a quantity over the ranks of a pipeline stage. `found`: the ranks' values;
    `places`: for each value, the index of its rank in `ranks`."""
    if math.isnan(sum(found)):
        known = [(value, at) for value, at in zip(found, places, strict=True) if not math.isnan(value)]
        if not known:
            return Spread(math.nan, math.nan, -1)
        found, places = [value for value, _ in known], [at for _, at in known]
    worst = max(found)
    # Of two ranks, the worst is compared with the other one.
    middle = len(found) // 2 if len(found) != 2 else 0
    return Spread(sorted(found)[middle], worst, ranks[places[found.index(worst)]])
