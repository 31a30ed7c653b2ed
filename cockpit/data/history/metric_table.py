"""Table of the metrics of a rank: the name and unit of each metric, and how to read its value from a record."""

from collections.abc import Callable
from dataclasses import dataclass

from agents.protocol import Step, Vitals

MiB = 1 << 20
GiB = 1 << 30


Totals = tuple[float, float, float]
"""Traffic of one step over all axes: ms not hidden by computation, ms in collectives, bytes sent."""


def totals(step: Step) -> Totals | None:
    """The totals of a step's traffic over all axes; None if the step has no traffic measurements."""
    if not step.comm:
        return None
    exposed_ms = ms = sent = 0.0
    for traffic in step.comm.values():
        exposed_ms += traffic.exposed_ms
        ms += traffic.ms
        sent += traffic.bytes
    return exposed_ms, ms, sent


Get = Callable[[Step, Totals | None], float | None]


@dataclass(frozen=True)
class Metric:
    """One number per rank, from its step records or, if `vital` is set, from its vital signs (readings of the device's
    sensors, about once a second).

    `worse`: 1 if a higher value is worse, -1 if a lower value is worse, 0 if neither. `get` computes the metric's value
    from a step record and the totals of the step's traffic, which several metrics need.
    """

    key: str
    title: str
    unit: str
    get: Get = lambda _step, _totals: None
    digits: int = 0
    worse: int = 1
    vital: Callable[[Vitals], float | None] | None = None
    normal: float | None = None  # a rank above this value is marked, whatever the values of its peers


def _share(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _over(value: float | None, divisor: int) -> float | None:
    return None if value is None else value / divisor


def _power_share(vitals: Vitals) -> float | None:
    limit = vitals.power_limit_w
    return 100 * vitals.power_w / limit if vitals.power_w is not None and limit else None


def _own_ms(step: Step, all: Totals | None) -> float | None:
    if not all:
        return None
    own_ms = step.step_ms - all[0]
    return own_ms if own_ms > 0 else 0.0


PHASE = "phase:"  # prefix of the keys of phases


def phase(name: str, waits: bool) -> Metric:
    """The metric that gives the time of the phase `name` in each step. `waits`: whether ranks wait for each other in
    this phase; if they do, a longer time does not count as worse."""
    return Metric(
        PHASE + name, f"{name} time", "ms", lambda step, _: step.phases.get(name), worse=int(not waits)
    )


STEP_TIME = Metric("step", "step time", "ms", lambda step, _: step.step_ms)
OWN_TIME = Metric("own", "own time", "ms", _own_ms)

# The slowest rank waits least, so less bubble and less waiting are not better.
WAITING = Metric("exposed", "exposed traffic", "ms", lambda _, all: all[0] if all else None, worse=0)
BUBBLE = Metric("bubble", "bubble", "%", lambda step, _: _share(step.bubble), 1, 0)
MEMORY = Metric("memory", "memory", "MiB", lambda step, _: _over(step.memory_bytes, MiB))
TOKENS = Metric("tokens", "tokens", "tok", lambda step, _: step.tokens, 0, -1)
CLOCK = Metric("clock", "SM clock", "MHz", worse=-1, vital=lambda vitals: vitals.sm_mhz)

FROM_STEPS = (
    OWN_TIME,
    STEP_TIME,
    BUBBLE,
    Metric("comm", "time in collectives", "ms", lambda _, all: all[1] if all else None, worse=0),
    WAITING,
    Metric("sent", "traffic sent", "MB", lambda _, all: all[2] / 1e6 if all else None, 1, 0),
    TOKENS,
    Metric("dropped", "dropped pairs", "", lambda step, _: step.dropped),
    MEMORY,
    Metric("rate", "throughput", "tok/s", lambda step, _: step.tokens_per_s, 0, -1),
    Metric("mfu", "MFU", "%", lambda step, _: _share(step.mfu), 1, -1),
)
"""Metrics from step records, without phases."""

FROM_VITALS = (
    Metric("device", "device use", "%", worse=0, vital=lambda vitals: vitals.device_percent),
    Metric(
        "device_memory",
        "device memory",
        "GiB",
        digits=1,
        vital=lambda vitals: _over(vitals.device_memory_bytes, GiB),
    ),
    Metric("power", "power", "W", worse=0, vital=lambda vitals: vitals.power_w),
    Metric("power_share", "share of power limit", "%", worse=0, vital=_power_share),
    Metric("temperature", "temperature", "°C", vital=lambda vitals: vitals.temperature_c),
    CLOCK,
    Metric(
        "throttle",
        "throttle reasons",
        "",
        vital=lambda vitals: None if vitals.throttle is None else len(vitals.throttle),
        normal=0.0,
    ),
)
"""Metrics from vital signs."""

METRICS = (*FROM_STEPS, *FROM_VITALS)
"""All metrics except the phases, which each run names itself."""
