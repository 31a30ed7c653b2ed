"""Findings, the `Detector` protocol, and the statistics that detectors share."""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from agents.protocol import Alert, Summary, Value
from agents.state.run_state import RunState

K = TypeVar("K", bound=Hashable)

RANKS_NAMED = 64  # maximum number of ranks listed in an alert, which also states the total number
AT_ONCE = 512  # maximum number of newest summaries that one check reads

# Names of alerts of the same level, most severe first. Other names come last.
SEVERITY_ORDER = (
    *("failed", "nan", "lost", "silent", "unheard", "absent", "stall", "collapse"),
    *("straggler", "slowdown", "throttle", "memory", "loss_spike", "gradient_spike", "drops", "dead_experts"),
)


@dataclass(frozen=True)
class Finding:
    """A problem that a detector has found in the run, such as a slow rank. Findings of successive checks that have the
    same `name` and `subject` are about the same problem. `began`: the step at which the problem began; if None, the
    step of the check that first found it."""

    name: str
    subject: str
    level: Literal["warning", "error"]
    text: str
    evidence: dict[str, Value] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    began: int | None = field(default=None, compare=False)


class Detector(Protocol):
    """Checks the run's state. A finding becomes an alert after `holds` consecutive checks that return it; the alert
    ends after `releases` consecutive checks that do not."""

    holds: int
    releases: int

    def check(self, state: RunState, now_s: float) -> list[Finding] | None:
        """The problems that the detector finds in the run at this moment. None if no new data has arrived since the
        last check; such a check counts neither towards `holds` nor towards `releases`.

        `now_s`: seconds on a clock that stops while the hub process is suspended.
        """


def name_of(state: RunState, rank: int) -> str:
    """The name of a rank, such as ``rank 5 (pp1 dp0 tp1)``."""
    hello = state.hellos.get(rank)
    coords = " ".join(f"{axis}{place}" for axis, place in hello.coords.items()) if hello else ""
    return f"rank {rank} ({coords})" if coords else f"rank {rank}"


def names_of(state: RunState, ranks: Sequence[int]) -> str:
    """The name of a single rank, or a list such as ``ranks 1, 3, 5, 7 and 12 more``."""
    if len(ranks) == 1:
        return name_of(state, ranks[0])
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def step_of(state: RunState) -> int:
    """The newest step of the run."""
    return (
        state.summaries[-1].step
        if state.summaries
        else max((s.step for s in state.steps.values()), default=0)
    )


def median(values: Iterable[float]) -> float:
    """The median of the finite values (the higher of the two middle values if the number of values is even); NaN if
    there are none.
    """
    finite = list(values)
    if not math.isfinite(sum(finite)):  # one test of the sum is faster than one per rank
        finite = [value for value in finite if math.isfinite(value)]
    return statistics.median_high(finite) if finite else math.nan


def spread(values: Sequence[float], middle: float) -> float:
    """Robust standard deviation: 1.4826 times the median absolute deviation (MAD) from `middle`."""
    return 1.4826 * median(abs(value - middle) for value in values)


def peer_baseline(values: Mapping[K, float]) -> dict[K, float]:
    """The reference value for each peer: the median of all peers. If there are only two peers, each peer's reference
    value is the value of the other.
    """
    if len(values) == 2:
        (first, first_value), (second, second_value) = values.items()
        return {first: second_value, second: first_value}
    return dict.fromkeys(values, median(values.values()))


class NewSummaries:
    """Tracks which summaries are new since the last call of `take`. `restarted`: whether that call found that the run
    had resumed from an earlier step."""

    def __init__(self) -> None:
        self._last = -1
        self.restarted = False

    def take(self, summaries: list[Summary]) -> list[Summary]:
        self.restarted = bool(summaries) and summaries[-1].step < self._last
        if self.restarted:
            self._last = -1
        start, first = len(summaries), max(0, len(summaries) - AT_ONCE)
        while start > first and summaries[start - 1].step > self._last:
            start -= 1
        self._last = summaries[-1].step if summaries else -1
        return summaries[start:]


def by_severity(alerts: Iterable[Alert]) -> list[Alert]:
    """Alerts sorted by level, then by `SEVERITY_ORDER`, then newest first."""
    place = {name: number for number, name in enumerate(SEVERITY_ORDER)}
    return sorted(
        alerts,
        key=lambda alert: (alert.level != "error", place.get(alert.name, len(SEVERITY_ORDER)), -alert.time_s),
    )
