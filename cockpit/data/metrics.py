"""Metrics of a rank: the table that the rank grid shows, plus one metric per phase that ranks report."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from agents.alerts import finding
from agents.protocol import Step, Vitals
from cockpit.data.store import Store, Topic

S = TypeVar("S")

MiB = 1 << 20
GiB = 1 << 30


@dataclass(frozen=True)
class Metric:
    """One number per rank, from its step records or, if `vital` is set, from its vital signs (about once a second).

    `worse` +1: more is worse; -1: less is worse; 0: neither.
    """

    key: str
    title: str
    unit: str
    get: Callable[[Step], float | None] = lambda _: None
    digits: int = 0
    worse: int = 1
    vital: Callable[[Vitals], float | None] | None = None


def _over(get: Callable[[S], float | None], divisor: float) -> Callable[[S], float | None]:
    def scaled(source: S) -> float | None:
        value = get(source)
        return None if value is None else value / divisor

    return scaled


def _phase(name: str, waits: bool) -> Metric:
    """The time of a phase. If ranks wait for each other inside phases, a longer phase is not worse."""
    return Metric(
        f"phase:{name}", f"{name} time", "ms", lambda step: step.phases.get(name), worse=int(not waits)
    )


STEP_TIME = Metric("step", "step time", "ms", lambda step: step.step_ms)
# Without metered traffic, the waiting time of a rank is unknown.
OWN_TIME = Metric("own", "own time", "ms", lambda step: step.own_ms if step.comm else None)

# The slowest rank waits least, so less bubble and less waiting are not better.
METRICS = (
    Metric("bubble", "bubble", "%", _over(lambda step: step.bubble, 0.01), 1, 0),
    Metric("comm", "time in collectives", "ms", lambda step: sum(t.ms for t in step.comm.values()), worse=0),
    Metric("exposed", "exposed traffic", "ms", lambda step: step.waited_ms, worse=0),
    Metric("sent", "traffic sent", "MB", lambda step: sum(t.bytes for t in step.comm.values()) / 1e6, 1, 0),
    Metric("tokens", "tokens", "tok", lambda step: step.tokens, 0, -1),
    Metric("dropped", "dropped pairs", "", lambda step: step.dropped),
    Metric("memory", "memory", "MiB", _over(lambda step: step.memory_bytes, MiB)),
    Metric("rate", "throughput", "tok/s", lambda step: step.tokens_per_s, 0, -1),
    Metric("mfu", "MFU", "%", _over(lambda step: step.mfu, 0.01), 1, -1),
    Metric("device", "device use", "%", worse=0, vital=lambda vitals: vitals.device_percent),
    Metric(
        "device_memory", "device memory", "GiB", digits=1, vital=_over(lambda v: v.device_memory_bytes, GiB)
    ),
    Metric("power", "power", "W", worse=0, vital=lambda vitals: vitals.power_w),
    Metric("temperature", "temperature", "°C", vital=lambda vitals: vitals.temperature_c),
    Metric("clock", "SM clock", "MHz", worse=-1, vital=lambda vitals: vitals.sm_mhz),
)


def available(store: Store) -> list[Metric]:
    """The metrics that at least one rank has a value for, in a fixed order."""
    return store.once("metrics", (Topic.RANKS,), lambda: _available(store))


def _available(store: Store) -> list[Metric]:
    steps = list(store.state.steps.values())
    phases = dict.fromkeys(name for step in steps for name in step.phases)
    waits = any(step.comm for step in steps)
    metrics = [OWN_TIME, STEP_TIME, *(_phase(name, waits) for name in phases), *METRICS]
    vitals = list(store.state.vitals.values())

    def has_value(metric: Metric) -> bool:
        if metric.vital:
            return any(metric.vital(one) is not None for one in vitals)
        return any(metric.get(step) is not None for step in steps)

    return [metric for metric in metrics if has_value(metric)] or [STEP_TIME]


def peers(store: Store) -> dict[int, tuple[int, ...]]:
    """The key of each rank's peer group. The peers of a rank are the ranks of its pipeline stage."""
    return {rank: (hello.coords.get("pp", 0),) for rank, hello in store.state.hellos.items()}


@dataclass(frozen=True)
class Reading:
    """One rank's number, and the relative deviation of its typical value from its peers (0.1: 10 % above). The baseline
    is the median of the peers, or in a group of two the other rank."""

    value: float | None
    deviation: float
    weight: float = 1.0  # for a time, its difference from the median of the peers as a share of the step


OUTLIER = 0.25  # deviation from which the grid marks a rank in the shown metric
OUTLIER_SHARED = 0.5  # the same threshold if ranks share cores, because then each rank is slow at times


def outlier_distance(store: Store) -> float:
    """The deviation from which the grid marks a rank, the same for every metric. It raises no alert: the hub does
    that."""
    return OUTLIER_SHARED if store.oversubscribed else OUTLIER


def median(values: Iterable[float]) -> float | None:
    """The median of the finite values, as the hub's detectors compute it; None if there are none."""
    middle = finding.median(values)
    return None if math.isnan(middle) else middle


def typical(store: Store, rank: int, get: Callable[[Step], float | None]) -> float | None:
    """The median over a rank's recent step records."""
    return median(value for step in store.recent.get(rank, ()) if (value := get(step)) is not None)


def drop_share(load: list[int], dropped: int) -> float:
    """Dropped (token, expert) pairs over all routed pairs."""
    return dropped / sum(load) if sum(load) else 0.0


def settled_step(store: Store) -> int | None:
    """The newest step that every reporting rank has finished, so that the grid compares ranks at one step."""
    return min((store.state.steps[rank].step for rank in store.reporting), default=None)


def read(store: Store, metric: Metric) -> dict[int, Reading]:
    """A reading for every known rank; a lost rank has no value."""
    return store.once(
        ("read", metric.key), (Topic.GRID, Topic.RANKS, Topic.CURVES), lambda: _read(store, metric)
    )


def _read(store: Store, metric: Metric) -> dict[int, Reading]:
    settled = settled_step(store)
    groups: dict[tuple[int, ...], dict[int, float]] = {}
    values_by_rank: dict[int, float | None] = {}
    by_peer = peers(store)
    for rank in store.not_lost:
        value = values_by_rank[rank] = (
            _vital(store, rank, metric) if metric.vital else typical(store, rank, metric.get)
        )
        if value is not None:
            groups.setdefault(by_peer[rank], {})[rank] = value
    middles = {
        rank: middle for values in groups.values() for rank, middle in finding.peer_baseline(values).items()
    }
    readings = {}
    for rank in store.state.hellos:
        value, middle = values_by_rank.get(rank), middles.get(rank)
        latest = next((step for step in store.recent.get(rank, ()) if step.step == settled), None)
        latest = latest or store.state.steps.get(rank)
        readings[rank] = Reading(
            _now(metric, latest, value) if rank in values_by_rank else None,
            value / middle - 1 if value is not None and middle else 0.0,
            _weight(store, rank, metric, value, middle),
        )
    return readings


def _weight(store: Store, rank: int, metric: Metric, value: float | None, middle: float | None) -> float:
    step_ms = typical(store, rank, STEP_TIME.get)
    if metric.unit != STEP_TIME.unit or value is None or middle is None or not step_ms:
        return 1.0
    return abs(value - middle) / step_ms


def _vital(store: Store, rank: int, metric: Metric) -> float | None:
    vitals = store.state.vitals.get(rank)
    return metric.vital(vitals) if metric.vital and vitals else None


def _now(metric: Metric, latest: Step | None, typical: float | None) -> float | None:
    """The value in the step record `latest`; for a vital sign, which belongs to no step, the typical value."""
    if metric.vital:
        return typical
    return metric.get(latest) if latest else None
