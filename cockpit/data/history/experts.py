"""History of the expert load: each expert's load, statistics of each layer, and since when an expert has been dead or
hot.

Records with the load of every expert (`Experts`) arrive every few steps; records with statistics of each layer's load
(`Loads`) arrive at almost every step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from agents.alerts.training import DEAD
from agents.protocol import Experts, LayerLoad, Loads, LoadSummary
from cockpit.data.history.frames import Frames, Range

HOT = 2.5  # an expert is hot if its load is at least this many times the fair share
MOST_LOADS = 1 << 22  # maximum number of values kept for individual experts (16 MiB)
MOST_FIGURES = 1 << 20  # maximum number of values kept for layers (4 MiB)


class Health(Enum):
    """The health problem of an expert; the value is the word that the screen shows."""

    DEAD = "dead"
    HOT = "hot"


def health(ratio: float) -> Health | None:
    """The health of an expert with this load relative to the fair share; None if the expert is neither dead nor hot."""
    return Health.DEAD if ratio < DEAD else Health.HOT if ratio >= HOT else None


def unwell_experts(low: Sequence[float], high: Sequence[float]) -> list[int]:
    """The numbers of the experts whose lowest load is below `DEAD` or whose highest load is at least `HOT`. `low` and
    `high`: the lowest and the highest load of each expert of a layer, relative to the fair share."""
    if not low or (min(low) >= DEAD and max(high) < HOT):
        return []
    return [number for number, ratio in enumerate(low) if ratio < DEAD or high[number] >= HOT]


class Figures(NamedTuple):
    """Statistics of a layer's expert load in one step."""

    most: float  # load of the hottest expert relative to the fair share
    cv: float  # standard deviation divided by the mean
    entropy: float  # evenness: 1 is even, 0 is a single expert
    drops: float  # share of the routed pairs
    idle: float  # number of experts without a token


@dataclass(frozen=True)
class Streak:
    """Consecutive received records in which an expert was dead or hot."""

    health: Health
    first: int  # step of the first of these records
    before: int | None  # step of an earlier record in which it was not; None if there is none
    exact: bool = True  # False: the records between `before` and `first` are thinned


class ExpertHistory:
    """A run's history of expert loads. `loads`: the load of each expert relative to the fair share (the mean load of
    its layer). `figures`: for each layer, the statistics that `Figures` lists.
    """

    def __init__(self) -> None:
        self.loads = Frames(MOST_LOADS)
        self.figures = Frames(MOST_FIGURES)
        self._newest: Experts | None = None
        self._streaks: dict[tuple[int, int], Streak] = {}

    def copy(self) -> "ExpertHistory":
        same = ExpertHistory()
        same.loads, same.figures = self.loads.copy(), self.figures.copy()
        same._newest, same._streaks = self._newest, self._streaks.copy()
        return same

    def clear(self) -> None:
        self.loads.clear()
        self.figures.clear()
        self._newest = None
        self._streaks = {}

    def cut(self, step: int) -> None:
        """Forget `step` and later steps."""
        self.figures.cut(step)
        if len(self.loads) and self.loads[-1].last >= step:
            self._newest = None
            self._cut_loads(step)
            self._streaks = self._streaks_at(len(self.loads) - 1)

    def _cut_loads(self, step: int) -> None:
        self.loads.cut(step)
        self._streaks = {cell: streak for cell, streak in self._streaks.items() if streak.first < step}

    def _streaks_at(self, at: int) -> dict[tuple[int, int], Streak]:
        """The streaks (see `Streak`) that include one frame of `loads`, by layer and expert. `at`: the index of the
        frame. An expert has a streak if it is dead in all records of the frame, or hot in all of them."""
        found = {}
        for layer in self.loads.layers if at >= 0 else ():
            low, high = self.loads.row(self.loads[at], layer)
            for expert, pair in enumerate(zip(low, high, strict=True)):
                kinds = {health(load) for load in pair}
                if len(kinds) == 1 and (kind := kinds.pop()):
                    known = self._streaks.get((layer, expert))
                    if known is None or known.health is not kind:
                        known = self._streak(layer, expert, kind, at)
                    found[layer, expert] = known
        return found

    # ------------------------------------------------------------------------------------------------- writing

    def add_loads(self, loads: Loads) -> None:
        """Add a record with the load statistics of each layer at a step."""
        rows = {layer.layer: _summarized(layer) for layer in loads.layers}
        if rows:
            self.figures.add(loads.step, rows)

    def add_experts(self, experts: Experts) -> None:
        """Add a record with the load of every expert at a step. A record that was sent again changes nothing."""
        rows = {layer.layer: row for layer in experts.layers if (row := ratios(layer))}
        if not rows or experts == self._newest:
            return
        self._newest = experts
        if len(self.loads) and experts.step <= self.loads[-1].last:
            self._cut_loads(experts.step)
        self._add_rows(experts.step, rows)
        # A vector may arrive after the summary of a later step, so it never removes later figures.
        if not len(self.figures) or self.figures[-1].last < experts.step:
            self.figures.add(experts.step, {layer.layer: figures(layer) for layer in experts.layers})

    def add(self, update: Experts | Loads) -> None:
        if isinstance(update, Experts):
            self.add_experts(update)
        else:
            self.add_loads(update)

    def extend(self, later: "ExpertHistory") -> None:
        """Append the records of the history `later` whose steps are after the last step of this history."""
        for step, rows in _records_after(later.loads, self.loads):
            self._add_rows(step, rows)
        for step, rows in _records_after(later.figures, self.figures):
            self.figures.add(step, rows)
        self._newest = later._newest or self._newest

    def _add_rows(self, step: int, rows: Mapping[int, Sequence[float]]) -> None:
        self.loads.add(step, rows)
        self._judge(rows)

    def _judge(self, rows: Mapping[int, Sequence[float]]) -> None:
        """Update the streaks from the newest record: an expert that is dead or hot in it continues or begins a streak,
        and the streak of any other expert ends. Layers that are not in the record keep their streaks."""
        streaks = {}
        for layer, row in rows.items():
            for expert in unwell_experts(row, row):
                found, known = health(row[expert]), self._streaks.get((layer, expert))
                assert found is not None
                if known is None or known.health is not found:
                    known = self._streak(layer, expert, found, len(self.loads) - 1)
                streaks[layer, expert] = known
        absent = {cell: streak for cell, streak in self._streaks.items() if cell[0] not in rows}
        self._streaks = absent | streaks

    # ------------------------------------------------------------------------------------------------- reading

    def streaks(self) -> Mapping[tuple[int, int], Streak]:
        """The current streak of each expert that is dead or hot, by layer and expert."""
        return self._streaks

    def streak(self, layer: int, expert: int, at: int | None = None) -> Streak | None:
        """The consecutive records, ending with frame number `at` (default: the newest frame), in which an expert was
        dead or hot. Returns None if the expert was neither dead nor hot in that frame."""
        if at is None or at == len(self.loads) - 1:
            return self._streaks.get((layer, expert))
        place = self.loads.place(layer, expert)
        if place is None:
            return None
        low, high = self.loads[at].low[place], self.loads[at].high[place]
        found = health(low)
        return self._streak(layer, expert, found, at) if found and found is health(high) else None

    def _streak(self, layer: int, expert: int, wanted: Health, at: int) -> Streak:
        """The consecutive records, up to the frame with the index `at`, in which an expert was dead, or in which it was
        hot. In this frame the health of the expert is `wanted`; the earlier frames are searched for the start of the
        streak."""
        place = self.loads.place(layer, expert)
        assert place is not None
        first = self.loads[at].first
        for number in range(at - 1, -1, -1):
            frame = self.loads[number]
            low, high = frame.low[place], frame.high[place]
            if math.isnan(low):
                continue
            found = {health(low), health(high)}
            if found == {wanted}:
                first = frame.first
            elif frame.records == 1 or (wanted not in found):
                return Streak(wanted, first, frame.last)
            else:
                return Streak(wanted, first, frame.first, exact=False)
        return Streak(wanted, first, None)

    def load_over_time(self, layer: int, expert: int) -> list[Range]:
        """The history of one expert's load relative to the fair share, oldest first."""
        return list(self.loads.series(layer, expert))


def _records_after(later: Frames, before: Frames) -> list[tuple[int, dict[int, Sequence[float]]]]:
    """The unmerged records of `later` whose steps are after the last step of `before`."""
    end = before[-1].last if len(before) else -1
    frames = [later[number] for number in range(len(later))]
    return [
        (frame.first, {layer: row for layer in later.layers if (row := later.row(frame, layer)[0])})
        for frame in frames
        if frame.records == 1 and frame.first > end
    ]


def ratios(layer: LayerLoad) -> list[float]:
    """The load of each expert divided by the fair share (the mean load of its layer); empty if the layer received no
    tokens.
    """
    total = sum(layer.load)
    each = len(layer.load) / total if total else 0.0
    return [load * each for load in layer.load] if total else []


def figures(layer: LayerLoad) -> Figures:
    """Statistics of a layer's expert load, computed from the load of each expert."""
    row, total = ratios(layer), sum(layer.load)
    if not row:
        return Figures(math.nan, math.nan, math.nan, math.nan, math.nan)
    return Figures(
        max(row),
        math.sqrt(sum((ratio - 1) ** 2 for ratio in row) / len(row)),
        _entropy([load / total for load in layer.load]),
        layer.dropped / total,
        sum(load == 0 for load in layer.load),
    )


def _entropy(shares: Sequence[float]) -> float:
    """How evenly the load is spread over the experts: the entropy of the experts' fractions of the load, divided by the
    entropy of equal fractions."""
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    return min(1.0, max(0.0, entropy / math.log(max(2, len(shares)))))


def _summarized(layer: LoadSummary) -> Figures:
    drops = layer.dropped / layer.pairs if layer.pairs else math.nan
    return Figures(layer.max_over_mean, layer.cv, layer.entropy, drops, layer.idle)
