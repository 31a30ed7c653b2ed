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
from cockpit.data.history.metric_table import OWN_TIME, PHASE, STEP_TIME
from cockpit.data.history.pivot import pivot
from cockpit.data.history.ranks import Gather

STEPS, NEWEST, SLOWEST = 512, 128, 16
BY_RANK_STEPS, BY_RANK_NEWEST, BY_RANK_SLOWEST = 64, 16, 8
BY_RANK_BYTES = 16 << 20
# With more ranks than this, fewer steps are added: a step of 16,384 ranks costs about 0.1 s.
EVERY_RANKS = 2048
LATE = 2  # a step is added when a rank has reported the step that is this many later

STEP, OWN = STEP_TIME.key, OWN_TIME.key  # the same keys as in `RankHistory`
WAIT, IDLE = "wait:", "idle:"
BUBBLE, BOUND = "bubble", "bound"
"""Quantities of a rank in a step: times in ms (the step, own time, each phase, exposed traffic of each axis), and the
bubble, its bound and its parts as shares of the pipeline window."""


class Spread(NamedTuple):
    """A quantity on a stage: the median and the worst value over its ranks. If no rank reported the quantity, the
    values are NaN and `rank` is -1."""

    median: float  # with two ranks, the lower value
    worst: float  # the highest
    rank: int  # the rank with the highest

    @property
    def known(self) -> bool:
        return self.rank >= 0


@dataclass(frozen=True)
class StepPhases:
    """One step: the spread of each quantity on each stage."""

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


@dataclass(frozen=True)
class ByRank:
    """One step: each quantity of each rank, NaN where a rank did not report it."""

    ranks: "array[int]"
    values: Mapping[str, "array[float]"]  # by quantity, in the order of `ranks`

    def of(self, rank: int) -> dict[str, float]:
        """The quantities of a rank; empty if it has no record of the step."""
        try:
            at = self.ranks.index(rank)
        except ValueError:
            return {}
        return {name: values[at] for name, values in self.values.items() if not math.isnan(values[at])}


class Phases:
    """The kept steps of a run, with their times by stage and, for some of them, by rank. `stage_of(rank)`: the pipeline
    coordinate of a rank."""

    def __init__(self, stage_of: Callable[[int], int]) -> None:
        self._stage_of = stage_of
        self._kept: KeptSteps[StepPhases] = KeptSteps(self._time, STEPS, NEWEST, SLOWEST)
        self._by_rank: KeptSteps[ByRank] = KeptSteps(
            self._time, BY_RANK_STEPS, BY_RANK_NEWEST, BY_RANK_SLOWEST, BY_RANK_BYTES
        )
        self._waiting: dict[int, dict[int, Step]] = {}  # records of steps not added yet, by step and rank
        self._taken = -1  # newest step that was added
        self._last: dict[int, int] = {}  # newest step of each rank
        self._turn = 0
        self.thinned = False  # whether steps were left out because there are many ranks
        self.revision = 0  # increases whenever a step is added or removed

    def copy(self, stage_of: Callable[[int], int]) -> "Phases":
        """A copy that later records do not change."""
        still = Phases(stage_of)
        still._kept, still._by_rank = self._kept.copy(still._time), self._by_rank.copy(still._time)
        still._waiting = {step: records.copy() for step, records in self._waiting.items()}
        still._taken, still._last, still._turn = self._taken, self._last.copy(), self._turn
        still.thinned, still.revision = self.thinned, self.revision
        return still

    def note(self, records: Iterable[Step]) -> None:
        """Add records. A step lower than a rank's last step means that the run was resumed; later steps are then
        removed.
        """
        for record in records:
            rank, step = record.rank, record.step
            if step < self._last.get(rank, -1):
                self.cut(step)
            self._last[rank] = step
            if step <= self._taken:
                continue  # too late to be included
            if step not in self._waiting:
                self._waiting[step] = {}
                for done in sorted(one for one in self._waiting if one <= step - LATE):
                    self._take(done, self._waiting.pop(done))
            self._waiting[step][rank] = record

    def cut(self, step: int) -> None:
        """Remove `step` and all later steps."""
        self._kept.cut(step)
        self._by_rank.cut(step)
        self._waiting = {one: records for one, records in self._waiting.items() if one < step}
        self._last = {rank: last for rank, last in self._last.items() if last < step}
        self._taken = min(self._taken, step - 1)
        self.revision += 1

    def waiting(self, step: int) -> list[Step]:
        """The records of a step that is not added yet, in rank order."""
        found = self._waiting.get(step, {})
        return [found[rank] for rank in sorted(found)]

    @property
    def steps(self) -> list[int]:
        """The kept steps, in order."""
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
        """The slowest kept step, ignoring the run's first step, which is always slow."""
        return max((step for step in self._kept if step > 0), key=self._time, default=None)

    def time_ms(self, step: int) -> float | None:
        """The step time of the slowest rank in a kept step."""
        kept = self._kept.get(step)
        return kept.step_ms if kept else None

    def _time(self, step: int) -> float:
        return self.time_ms(step) or 0.0

    def _take(self, step: int, found: Mapping[int, Step]) -> None:
        self._taken = step
        records = [found[rank] for rank in sorted(found)]
        if len(records) > EVERY_RANKS:
            self._turn += 1
            slow = sorted(map(self._time, self._kept), reverse=True)[:SLOWEST]
            due = self._turn % -(-len(records) // EVERY_RANKS) == 0
            if not due and len(slow) == SLOWEST and max(one.step_ms for one in records) <= slow[-1]:
                self.thinned = True
                return
        by_rank = values_of(records)
        phases = phases_of(step, records, by_rank, self._stage_of)
        self._kept.add(step, phases)
        self._by_rank.add(step, by_rank, sum(4 * len(values) for values in by_rank.values.values()))
        self.revision += 1


def values_of(records: list[Step]) -> ByRank:
    """The quantities in the records of a step, by name and rank: step time, own time, phases, waits and bubble."""
    phases = pivot([record.phases for record in records])
    comm = pivot([record.comm for record in records])
    waits = {
        axis: [math.nan if one is None else one.exposed_ms for one in traffic]
        for axis, traffic in comm.items()
    }
    columns: dict[str, Sequence[float | None]] = {STEP: [record.step_ms for record in records]}
    if waits:  # without metered traffic, own time is unknown
        columns[OWN] = _own_ms(records, waits)
    columns |= {PHASE + name: values for name, values in phases.items()}
    columns |= {WAIT + axis: values for axis, values in waits.items()}
    bubbles = [record.bubble for record in records]
    if bubbles.count(None) < len(bubbles):
        columns[BUBBLE] = bubbles
        columns[BOUND] = [record.bubble_bound for record in records]
    parts = pivot([record.bubble_parts or {} for record in records])
    columns |= {IDLE + part: values for part, values in parts.items()}
    ranks = array("l", [record.rank for record in records])
    return ByRank(ranks, {name: _floats(values) for name, values in columns.items()})


def _own_ms(records: list[Step], waits: Mapping[str, Sequence[float]]) -> list[float]:
    """Each record's own time, as in `Step.own_ms` but computed from columns; NaN where its traffic is not metered."""
    waited = list(map(sum, zip(*waits.values(), strict=True)))
    if math.isnan(sum(waited)):  # not all ranks report the same axes
        return [record.own_ms if record.comm else math.nan for record in records]
    return [max(0.0, record.step_ms - wait) for record, wait in zip(records, waited, strict=True)]


def _floats(values: Sequence[float | None]) -> "array[float]":
    """The values as 32-bit floats; NaN for a missing value."""
    try:
        return array("f", values)  # type: ignore[arg-type]
    except TypeError:
        return array("f", [math.nan if value is None else value for value in values])


def phases_of(step: int, records: list[Step], by_rank: ByRank, stage_of: Callable[[int], int]) -> StepPhases:
    """The spread of each quantity on each stage."""
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
    return StepPhases(
        step,
        max(record.revision for record in records),
        max(record.step_ms for record in records),
        len(records),
        tuple(sorted(places)),
        spreads,
    )


def _spread(ranks: Sequence[int], places: Sequence[int], found: Sequence[float]) -> Spread:
    """The spread of the values of a stage; `places`: the index in `ranks` of each value."""
    if math.isnan(sum(found)):
        known = [(value, at) for value, at in zip(found, places, strict=True) if not math.isnan(value)]
        if not known:
            return Spread(math.nan, math.nan, -1)
        found, places = [value for value, _ in known], [at for _, at in known]
    worst = max(found)
    # Of two ranks, the worst is compared with the other one.
    middle = len(found) // 2 if len(found) != 2 else 0
    return Spread(sorted(found)[middle], worst, ranks[places[found.index(worst)]])
