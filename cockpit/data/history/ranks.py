"""The newest steps of every rank, one compact array per metric and step, in bounded memory.

A live stream, a recording and a simulation fill this history in the same way, through `Store.note`.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from operator import itemgetter

from agents.protocol import Step, Vitals
from cockpit.data.history.metric_table import FROM_STEPS, FROM_VITALS, PHASE, totals
from cockpit.data.history.pivot import pivot

MOST_STEPS = 512
LEAST_STEPS = 16
# Values kept over all steps, of four bytes each: 24 MiB. In a run of 16,384 ranks with 14 metrics this is 27
# steps.
MOST_VALUES = 6 << 20
MOST_PHASES = 32  # limit on phases with a history, because a rank may use any number of phase names
# added to `RankHistory.added` when steps are removed, so that earlier results are computed again
ANEW = 1 << 20
NAN = math.nan

Column = Sequence[float]  # one metric at one step, by position; NaN: no value


class RankHistory:
    """The value of each metric on each rank, at each of the newest steps.

    Each rank has a position: its index in `ranks`. The list `ranks` is in the order in which the ranks were first seen.
    The column of an early step may be shorter than `ranks`, because some ranks joined after this step.
    """

    def __init__(self) -> None:
        self.revision = 0  # changes with every new record
        self.added = 0  # steps added since the beginning, also those that are no longer kept
        self._forget()

    def _forget(self) -> None:
        self.ranks: list[int] = []
        self.places: dict[int, int] = {}  # position by rank
        self._frames: dict[
            int, dict[str, array[float]]
        ] = {}  # columns by key of the metric, by step in order
        # the number of step records and of vital signs, by step
        self._counts: dict[int, tuple[int, int]] = {}
        self._keys: dict[str, None] = {}  # keys of all metrics that ever had a value, in order
        self._last: dict[int, int] = {}  # newest step record of each rank

    # ------------------------------------------------------------------------------------------- writing

    def note(self, records: Iterable[Step | Vitals]) -> None:
        """Add records. A step number lower than a rank's last step means that the run was resumed; later steps are then
        removed.
        """
        steps: dict[int, list[Step]] = {}
        vitals: dict[int, list[Vitals]] = {}
        places, last = self.places, self._last
        for record in records:
            rank, step = record.rank, record.step
            if rank not in places:
                places[rank] = len(self.ranks)
                self.ranks.append(rank)
            if type(record) is Step:
                if step < last.get(rank, -1):
                    self.cut(step)
                    last = self._last
                    for waiting in (steps, vitals):
                        for later in [at for at in waiting if at >= step]:
                            del waiting[later]
                last[rank] = step
                if step in steps:
                    steps[step].append(record)
                else:
                    steps[step] = [record]
            elif type(record) is Vitals:
                vitals.setdefault(step, []).append(record)
        for step, group in steps.items():
            self._add_steps(self._frame(step), group)
        for step, signs in vitals.items():
            self._add_vitals(self._frame(step), signs)
        for step in steps.keys() | vitals.keys():
            known, signs_known = self._counts.get(step, (0, 0))
            self._counts[step] = known + len(steps.get(step, ())), signs_known + len(vitals.get(step, ()))
        if steps or vitals:
            self.revision += 1
            self._bound()

    def cut(self, step: int) -> None:
        """Remove `step` and all later steps."""
        for later in [at for at in self._frames if at >= step]:
            del self._frames[later], self._counts[later]
        self._last = {rank: at for rank, at in self._last.items() if at < step}
        self.revision += 1
        self.added += ANEW

    def clear(self) -> None:
        """Forget all ranks and steps."""
        self._forget()
        self.revision += 1
        self.added += ANEW

    def keep_only(self, ranks: Iterable[int]) -> None:
        """Forget everything if a known rank is not in `ranks`, because the run's set of ranks has then changed."""
        if not self.places.keys() <= set(ranks):
            self.clear()

    def _frame(self, step: int) -> dict[str, "array[float]"]:
        frame = self._frames.get(step)
        if frame is None:
            newest = next(reversed(self._frames), -1)
            frame = self._frames[step] = {}
            self.added += 1
            if step < newest:  # a rank that is behind the others
                self._frames = dict(sorted(self._frames.items()))
        return frame

    def _add_steps(self, frame: dict[str, "array[float]"], group: list[Step]) -> None:
        places = [self.places[record.rank] for record in group]
        traffic = list(map(totals, group))
        for metric in FROM_STEPS:
            self._put(frame, metric.key, places, list(map(metric.get, group, traffic)))
        for name, values in pivot([record.phases for record in group]).items():
            key = PHASE + name
            if key in self._keys or len(self.phases) < MOST_PHASES:
                self._put(frame, key, places, values)

    def _add_vitals(self, frame: dict[str, "array[float]"], group: list[Vitals]) -> None:
        places = [self.places[record.rank] for record in group]
        for metric in FROM_VITALS:
            if metric.vital:
                self._put(frame, metric.key, places, list(map(metric.vital, group)))

    def _put(
        self, frame: dict[str, "array[float]"], key: str, places: list[int], values: Sequence[float | None]
    ) -> None:
        column = frame.get(key)
        if column is None:
            if values.count(None) == len(values):
                return
            self._keys.setdefault(key)
            column = frame[key] = array("f", [NAN]) * len(self.ranks)
        elif len(column) < len(self.ranks):
            column.extend([NAN] * (len(self.ranks) - len(column)))
        first, last = places[0], places[-1] + 1
        # the usual case, and fast: `places` has no rank twice
        if last - first == len(places) and None not in values and places == list(range(first, last)):
            column[first:last] = array("f", values)  # type: ignore[arg-type, type-var]
            return
        for place, value in zip(places, values, strict=True):
            if value is not None:
                column[place] = value

    def _bound(self) -> None:
        while len(self._frames) > self.capacity:
            oldest = next(iter(self._frames))
            del self._frames[oldest], self._counts[oldest]

    # -------------------------------------------------------------------------------------------- reading

    @property
    def capacity(self) -> int:
        """The maximum number of steps to keep; it decreases as the number of ranks and metrics grows."""
        room = MOST_VALUES // max(1, len(self.ranks) * len(self._keys))
        return max(LEAST_STEPS, min(MOST_STEPS, room))

    @property
    def phases(self) -> list[str]:
        """Names of the phases into which the ranks divide a step, in the order in which ranks report them."""
        return [key.removeprefix(PHASE) for key in self._keys if key.startswith(PHASE)]

    def metrics(self, newest: int | None = None) -> set[str]:
        """Keys of the metrics that at least one rank has a value for, in the `newest` steps or in all kept steps."""
        frames = islice(reversed(self._frames.values()), newest)
        return set(chain.from_iterable(frames))

    def steps(self, key: str) -> list[int]:
        """The kept steps at which at least one rank has a value of this metric, oldest first."""
        return [step for step, frame in self._frames.items() if key in frame]

    def reported(self, step: int, vital: bool = False) -> int:
        """The number of ranks whose step record for this step has arrived; with `vital`, the number whose vital signs
        have arrived. A client of a large run gets only the newest records, so for some steps it has records of only
        some ranks.
        """
        return self._counts.get(step, (0, 0))[vital]

    def column(self, key: str, step: int) -> Column:
        """The values of one metric at one step, in the order of `ranks`; empty if the step is not kept."""
        return self._frames.get(step, {}).get(key, ())

    def newest(self, key: str, count: int, to: int | None = None) -> list[Column]:
        """The values of one metric on all ranks (a column) in each of the newest `count` steps up to step `to`, newest
        first."""
        found: list[Column] = []
        for step, frame in reversed(self._frames.items()):
            if key in frame and (to is None or step <= to):
                found.append(frame[key])
                if len(found) == count:
                    break
        return found

    def value(self, key: str, step: int, rank: int) -> float | None:
        """The value of one rank at one step; None if it is not known."""
        column, place = self.column(key, step), self.places.get(rank, -1)
        if not 0 <= place < len(column) or math.isnan(column[place]):
            return None
        return column[place]

    def series(self, key: str, rank: int) -> list[tuple[int, float]]:
        """All kept (step, value) pairs of one rank, oldest first."""
        pairs = ((step, self.value(key, step, rank)) for step in self.steps(key))
        return [(step, value) for step, value in pairs if value is not None]

    def copy(self) -> "RankHistory":
        """A copy that does not change when records are added to the original."""
        still = RankHistory()
        still.revision, still.added = self.revision, self.added
        still.ranks, still.places = self.ranks[:], self.places.copy()
        still._counts = self._counts.copy()
        still._keys, still._last = self._keys.copy(), self._last.copy()
        still._frames = {
            step: {key: column[:] for key, column in frame.items()} for step, frame in self._frames.items()
        }
        return still


class Gather:
    """Callable that returns a column's values at the given positions, in their order; NaN where the column is too
    short."""

    def __init__(self, places: Sequence[int]) -> None:
        self._count = len(places)
        self._needs = max(places, default=-1) + 1
        self._get = itemgetter(*places) if places else None

    def __call__(self, column: Column) -> tuple[float, ...]:
        if self._get is None:
            return ()
        if len(column) < self._needs:
            column = array("f", [*column, *[NAN] * (self._needs - len(column))])
        found = self._get(column)
        return found if self._count > 1 else (found,)
