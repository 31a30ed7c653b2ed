"""The severity level of each rank for one metric. The levels determine which ranks the rank grid marks, which ranks the
filter regards as slow, and which are listed as anomalies.
"""

from cockpit.data.diagnosis.diagnosis import Level, alerted_ranks
from cockpit.data.metrics import Metric, Readings, outlier_distance
from cockpit.data.store import Store

MIN_STEP_SHARE = 0.05  # a deviation below this share of a step is not marked
SEVERITY = {Level.BAD: 3, Level.WARN: 2, Level.NOTE: 1, Level.GOOD: 0}


def levels_of(store: Store, metric: Metric, readings: Readings) -> dict[int, Level]:
    """The severity level of each rank, from worst to best: lost, slow or stalled, without data, good."""
    ranks = readings.ranks
    levels = dict.fromkeys(ranks, Level.GOOD)
    for rank, value in zip(ranks, readings.values_, strict=True):
        if value != value:
            levels[rank] = Level.NOTE
    for rank in alerted_ranks(store, "stall", "straggler") & levels.keys():
        levels[rank] = Level.WARN
    threshold = outlier_distance(store)
    if metric.normal is not None:
        marked = [at for at, value in enumerate(readings.values_) if value > metric.normal]
    elif metric.worse > 0:
        marked = [at for at, deviation in enumerate(readings.deviations) if deviation >= threshold]
    elif metric.worse < 0:
        marked = [at for at, deviation in enumerate(readings.deviations) if -deviation >= threshold]
    else:
        marked = []
    for at in marked:
        if metric.normal is not None or readings.weight(at) >= MIN_STEP_SHARE:
            levels[ranks[at]] = Level.WARN
    for rank, gone in store.state.gone.items():
        if not gone.clean and rank in levels:
            levels[rank] = Level.BAD
    return levels


def worst_first(metric: Metric, readings: Readings, levels: dict[int, Level]) -> list[int]:
    """The ranks sorted by severity level, most severe first; within a level, the rank with the worst deviation comes
    first."""
    towards = metric.worse or 1
    order = sorted(
        zip(readings.ranks, readings.deviations, strict=True),
        key=lambda pair: (-SEVERITY[levels[pair[0]]], -pair[1] * towards),
    )
    return [rank for rank, _ in order]
