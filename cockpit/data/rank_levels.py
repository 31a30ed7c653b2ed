"""The level of each rank in a metric: what the rank grid marks, and what the filter and the anomalies call slow."""

from cockpit.data.diagnosis import Level, alerted_ranks
from cockpit.data.metrics import Metric, Reading, outlier_distance
from cockpit.data.store import Store

MIN_STEP_SHARE = 0.05  # a deviation below this share of a step is not marked


def levels_of(store: Store, metric: Metric, readings: dict[int, Reading]) -> dict[int, Level]:
    """The level of each rank: lost, slow or stalled, without data, or good."""
    alerted = alerted_ranks(store, "stall", "straggler")
    threshold = outlier_distance(store)
    levels = {}
    for rank, reading in readings.items():
        gone = store.state.gone.get(rank)
        if gone and not gone.clean:
            levels[rank] = Level.BAD
        elif rank in alerted or (
            metric.worse
            and reading.deviation * metric.worse >= threshold
            and reading.weight >= MIN_STEP_SHARE
        ):
            levels[rank] = Level.WARN
        else:
            levels[rank] = Level.NOTE if reading.value is None else Level.GOOD
    return levels
