"""The values of all ranks in one step, in columns: one compact array for each quantity."""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from agents.protocol import Step
from cockpit.data.history.metric_table import OWN_TIME, PHASE, STEP_TIME
from cockpit.data.history.pivot import pivot

STEP, OWN = STEP_TIME.key, OWN_TIME.key  # the same keys as in `RankHistory`
WAIT, IDLE = "wait:", "idle:"
BUBBLE, BOUND = "bubble", "bound"
"""Quantities of a rank in a step: times in ms (the step, own time, each phase, exposed traffic of each axis), and the
bubble, its bound and its parts as fractions of the time from the start of the step's pipeline to the end of its last
action."""
NAN = math.nan


@dataclass(frozen=True)
class ByRank:
    """The values of one step by quantity and rank; NaN where a rank did not report the quantity."""

    ranks: "array[int]"
    values: Mapping[str, "array[float]"]  # by quantity, in the order of `ranks`

    def of(self, rank: int) -> dict[str, float]:
        """The values of one rank by quantity; empty if the rank has no record of the step."""
        try:
            at = self.ranks.index(rank)
        except ValueError:
            return {}
        return {name: values[at] for name, values in self.values.items() if not math.isnan(values[at])}


class ArrivingStep:
    """The values of a step whose records are still arriving. The records of 4,096 ranks take 10 MiB if they are stored
    as objects, and 0.4 MiB as columns."""

    def __init__(self) -> None:
        self.revision = 0  # the highest of the records
        self.step_ms = 0.0  # step time of the slowest rank
        self._places: dict[int, int] = {}  # position in the columns by rank
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def copy(self) -> "ArrivingStep":
        """A copy that does not change when records are added to the original."""
        still = ArrivingStep()
        still.revision, still.step_ms = self.revision, self.step_ms
        still._places = self._places.copy()
        still._columns = {name: column[:] for name, column in self._columns.items()}
        return still

    def add(self, records: Iterable[Step]) -> None:
        """Add records. A later record of a rank replaces the earlier one."""
        newest = list({record.rank: record for record in records}.values())
        part = values_of(newest)
        places = [self._places.setdefault(rank, len(self._places)) for rank in part.ranks]
        more = array("f", [NAN]) * (len(self._places) - len(next(iter(self._columns.values()), ())))
        for column in self._columns.values():
            column.extend(more)
        for name in part.values:  # phases are shown in the order in which ranks report them
            if name not in self._columns:
                self._columns[name] = array("f", [NAN]) * len(self._places)
        for name, column in self._columns.items():
            values = part.values.get(name) or [NAN] * len(places)
            if places[-1] - places[0] == len(places) - 1 and places == list(range(places[0], places[-1] + 1)):
                column[places[0] : places[-1] + 1] = array("f", values)
            else:
                for place, value in zip(places, values, strict=True):
                    column[place] = value
        self.revision = max(self.revision, *(record.revision for record in newest))
        self.step_ms = max(self.step_ms, *(record.step_ms for record in newest))

    def by_rank(self) -> ByRank:
        """The values that have arrived so far, sorted by rank."""
        ranks = sorted(self._places)
        places = [self._places[rank] for rank in ranks]
        if places == list(range(len(places))):
            return ByRank(array("l", ranks), {name: column[:] for name, column in self._columns.items()})
        pick = itemgetter(*places)
        return ByRank(
            array("l", ranks), {name: array("f", pick(column)) for name, column in self._columns.items()}
        )


def values_of(records: list[Step]) -> ByRank:
    """The quantities in the records of a step (step time, own time, phases, waits and bubble), by name and rank."""
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
    """The own time of each record: the step time without the waiting in collectives and for pipeline neighbours. The
    same as `Step.own_ms`, but computed from columns; NaN for a record without traffic measurements."""
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
