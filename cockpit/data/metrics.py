"""Readings of a metric: the value of every rank, and its deviation from the rank's peers or from the rank's own earlier
steps.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from agents.alerts import finding
from agents.protocol import Step
from cockpit.data.history.metric_table import (
    FROM_STEPS,
    FROM_VITALS,
    METRICS,
    OWN_TIME,
    STEP_TIME,
    GiB,
    Metric,
    phase,
    totals,
)
from cockpit.data.history.ranks import NAN, Column, Gather
from cockpit.data.store import Store, Topic

__all__ = ["METRICS", "OWN_TIME", "STEP_TIME", "GiB", "Metric"]

# number of newest steps whose median is a rank's typical value, so that one slow step does not mark a rank as slow
RECENT_STEPS = 8
BASELINE_STEPS = 33  # number of steps whose median is a rank's own baseline
LEAST_BASELINE = 8  # with fewer steps there is no baseline
OUTLIER = 0.25  # deviation from which the grid marks a rank in the shown metric
OUTLIER_SHARED = 0.5  # the same threshold if ranks share cores, because then each rank is slow at times


class Against(Enum):
    """What the colour of a rank in the grid shows for the selected metric: the deviation from a baseline, or the value.
    `against_text` returns the text for the legend."""

    PEERS = "against the median of its peers"
    OWN = "against its own earlier steps"
    NOTHING = "by value"


def peers_word(store: Store) -> str:
    """The phrase that stands for the peers of a rank, either "its stage" or, without pipeline parallelism, "the
    others"."""
    return "its stage" if "pp" in store.axes() else "the others"


def against_text(against: Against, store: Store) -> str:
    """Legend text: the baseline that each rank is compared with."""
    return f"against the median of {peers_word(store)}" if against is Against.PEERS else against.value


def available(store: Store) -> list[Metric]:
    """The metrics that at least one rank has a value for, in a fixed order."""
    return store.once("metrics", (Topic.GRID, Topic.RANKS), lambda: _available(store))


def _available(store: Store) -> list[Metric]:
    history = store.rank_history
    # A vital sign is missing in most steps, because it is sent about once a second.
    known = history.metrics(RECENT_STEPS) | {metric.key for metric in FROM_VITALS} & history.metrics()
    phases = [phase(name, waits=OWN_TIME.key in known) for name in history.phases]
    own, step, *others = FROM_STEPS
    metrics = (own, step, *phases, *others, *FROM_VITALS)
    return [metric for metric in metrics if metric.key in known] or [STEP_TIME]


def peers(store: Store) -> dict[int, tuple[int, ...]]:
    """Maps each rank to the key of its peer group. The peers of a rank are the ranks of its pipeline stage."""
    return store.once(
        "peers",
        (Topic.GRID,),
        lambda: {rank: (hello.coords.get("pp", 0),) for rank, hello in store.state.hellos.items()},
    )


@dataclass(frozen=True)
class Reading:
    """A rank's value of a metric. `deviation`: the relative difference between the rank's median over the newest steps
    and the baseline (0.1: 10 % above). At a selected step, and for vital signs, the value itself is used instead of the
    median."""

    value: float | None
    deviation: float
    weight: float = 1.0  # for a time: its difference from the baseline as a share of the step


class Readings(Mapping[int, Reading]):
    """Maps each rank to its value of a metric and the deviation from its baseline. The lists are in the order of
    `ranks`; NaN means no value.

    The baseline of a rank is the median of its peers (in a group of two, the other rank), or the median of its own
    earlier steps. A rank without a baseline has the deviation 0.
    """

    def __init__(
        self, ranks: Sequence[int], values: list[float], typical: list[float], baselines: list[float]
    ) -> None:
        self.ranks, self.values_, self.typical, self.baselines = ranks, values, typical, baselines
        pairs = zip(typical, baselines, strict=True)
        if math.isfinite(sum(typical)) and all(baselines) and math.isfinite(sum(baselines)):
            self.deviations = [value / baseline - 1 for value, baseline in pairs]
        else:
            self.deviations = [v / m - 1 if m and v == v and m == m else 0.0 for v, m in pairs]
        self.step_ms: float | None = None  # for a time: the typical duration of a step
        self._place: dict[int, int] = {}

    @property
    def place(self) -> dict[int, int]:
        """Maps each rank to its index in `ranks`."""
        if not self._place:
            self._place = {rank: place for place, rank in enumerate(self.ranks)}
        return self._place

    def __getitem__(self, rank: int) -> Reading:
        at = self.place[rank]
        value = self.values_[at]
        return Reading(None if value != value else value, self.deviations[at], self.weight(at))

    def weight(self, at: int) -> float:
        difference = self.typical[at] - self.baselines[at]
        return 1.0 if not self.step_ms or difference != difference else abs(difference) / self.step_ms

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)


def outlier_distance(store: Store) -> float:
    """The smallest relative deviation from the baseline for which the rank grid marks a rank as an outlier; it is the
    same for all metrics. An outlier in the grid is not an alert; only the hub raises alerts."""
    return OUTLIER_SHARED if store.oversubscribed else OUTLIER


def median(values: Iterable[float]) -> float | None:
    """The median of the finite values, as the hub's detectors compute it; None if there are none."""
    middle = finding.median(values)
    return None if math.isnan(middle) else middle


def drop_share(load: list[int], dropped: int) -> float:
    """The share of the routed token-expert pairs that were dropped."""
    return dropped / sum(load) if sum(load) else 0.0


def settled_step(store: Store) -> int | None:
    """The newest step that every reporting rank has finished, so that the grid compares ranks at one step."""
    steps = store.state.steps
    return store.once(
        "settled",
        (Topic.GRID, Topic.RANKS, Topic.CURVES),
        lambda: min((steps[rank].step for rank in store.reporting), default=None),
    )


def read(store: Store, metric: Metric, against: Against = Against.PEERS, at: int | None = None) -> Readings:
    """For every rank, the value of `metric` and its deviation from the baseline; a lost rank has no value. `at`: read
    this step from the history instead of the newest steps.
    """
    return store.once(
        ("read", metric.key, against, at),
        (Topic.GRID, Topic.RANKS, Topic.CURVES),
        lambda: _read(store, metric, against, at),
    )


def _read(store: Store, metric: Metric, against: Against, at: int | None) -> Readings:
    ranks = list(store.state.hellos)
    gather = _gather(store)
    if at is not None:
        values = typical = list(gather(store.rank_history.column(metric.key, at)))
    elif metric.vital:
        vitals = store.state.vitals
        found = [metric.vital(vitals[rank]) if rank in vitals else None for rank in ranks]
        values = typical = [NAN if value is None else float(value) for value in found]
    else:
        values, typical = _newest(store, metric, ranks)
    lost = [
        place
        for place, rank in enumerate(ranks)
        if rank in store.state.gone and not store.state.gone[rank].clean
    ]
    for place in lost:
        values[place] = typical[place] = NAN
    if against is Against.OWN:
        baselines = list(gather(own_baselines(store, metric)))
    else:
        baselines = peer_medians(store, typical)
    readings = Readings(ranks, values, typical, baselines)
    if metric.unit == STEP_TIME.unit:
        readings.step_ms = _step_ms(store, at)
    return readings


def _newest(store: Store, metric: Metric, ranks: list[int]) -> tuple[list[float], list[float]]:
    """For each rank, the value of a metric in the newest step that all reporting ranks have finished, and its median
    over the newest steps. For a rank without a record of these steps, both lists contain the value of its newest
    record."""
    settled, history, gather = settled_step(store), store.rank_history, _gather(store)
    values = list(gather(history.column(metric.key, -1 if settled is None else settled)))
    typical = list(gather(medians(history.newest(metric.key, RECENT_STEPS, settled))))
    if not math.isfinite(sum(values)) or not math.isfinite(sum(typical)):
        for place, rank in enumerate(ranks):
            if values[place] != values[place]:
                values[place] = _value(metric, store.state.steps.get(rank))
            if typical[place] != typical[place]:
                typical[place] = values[place]
    return values, typical


def _value(metric: Metric, record: Step | None) -> float:
    value = metric.get(record, totals(record)) if record else None
    return NAN if value is None else float(value)


def _gather(store: Store) -> Gather:
    """A `Gather` that returns the values of a history column in the order of the ranks in the run's state."""
    places = store.rank_history.places
    return store.once(
        "gather",
        (Topic.GRID,),
        lambda: Gather([places.get(rank, len(places)) for rank in store.state.hellos]),
        len(places),
    )


def medians(columns: Sequence[Column]) -> Column:
    """The element-wise median of `columns`, ignoring missing values; NaN where all are missing."""
    size = max(map(len, columns), default=0)
    columns = [
        column if len(column) == size else [*column, *[NAN] * (size - len(column))] for column in columns
    ]
    middle = len(columns) // 2
    if all(math.isfinite(sum(column)) for column in columns):
        return [sorted(values)[middle] for values in zip(*columns, strict=True)]
    return [_middle(values) for values in zip(*columns, strict=True)]


def _middle(values: Sequence[float]) -> float:
    known = sorted(value for value in values if abs(value) < math.inf)
    return known[len(known) // 2] if known else NAN


def _groups(store: Store) -> list[list[int]]:
    """For each group of ranks that are compared with each other (a pipeline stage), the indices of its ranks."""

    def compute() -> list[list[int]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, key in enumerate(peers(store).values()):
            groups.setdefault(key, []).append(place)
        return list(groups.values())

    return store.once("groups", (Topic.GRID,), compute)


def peer_medians(store: Store, values: Sequence[float]) -> list[float]:
    """For each rank, the baseline that its value is compared with: the median over the ranks of its pipeline stage or,
    if only two of them have a value, the value of the other one. `values`: one value per rank, in the order of the
    ranks in the state."""
    baselines = [NAN] * len(values)
    for places in _groups(store):
        known = [place for place in places if math.isfinite(values[place])]
        if len(known) == 2:
            one, other = known
            baselines[one], baselines[other] = values[other], values[one]
        elif known:
            middle = sorted(values[place] for place in known)[len(known) // 2]
            for place in places:
                baselines[place] = middle
    return baselines


def own_baselines(store: Store, metric: Metric) -> Column:
    """For each rank, the median of the metric over earlier steps, in the order of `RankHistory.ranks`; empty if too few
    steps are kept. The medians are recomputed only after several more steps, because they change slowly.
    """
    history = store.rank_history

    def compute() -> Column:
        steps = history.steps(metric.key)[:-RECENT_STEPS]
        if len(steps) < LEAST_BASELINE:
            return ()
        every = -(-len(steps) // BASELINE_STEPS)
        return medians([history.column(metric.key, step) for step in steps[::every]])

    return store.once(("own", metric.key), (Topic.GRID,), compute, history.added // RECENT_STEPS)


def _step_ms(store: Store, at: int | None) -> float | None:
    """The median over ranks of the step time, in step `at` or in the newest step that all reporting ranks have
    finished."""
    history = store.rank_history
    columns = (
        [history.column(STEP_TIME.key, at)]
        if at is not None
        else history.newest(STEP_TIME.key, 1, settled_step(store))
    )
    return median(columns[0]) if columns else None
