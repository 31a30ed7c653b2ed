"""What a detector says: a finding with its evidence, and the shape of a detector."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from agents.protocol import Alert, Summary, Value
from agents.state.run_state import RunState

K = TypeVar("K", bound=Hashable)

RANKS_NAMED = 64  # in an alert; the text says how many there are
AT_ONCE = 512  # summaries judged in one look, the newest

# Of alerts of one level: the gravest first. A name that is not here comes after those that are.
GRAVITY = (
    *("failed", "nan", "lost", "silent", "unheard", "stall", "collapse"),
    *("straggler", "slowdown", "throttle", "memory", "loss_spike", "gradient_spike", "drops", "dead_experts"),
)


@dataclass(frozen=True)
class Finding:
    """Something that is so now. `name` and `subject` are its key: a later finding with both is the same one."""

    name: str
    subject: str
    level: Literal["warning", "error"]
    text: str
    evidence: dict[str, Value] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()


class Detector(Protocol):
    """Looks at the run's state from time to time. A finding becomes an alert when it was there in `holds` looks
    running, and the alert ends when it was missing in `releases` looks running."""

    holds: int
    releases: int

    def look(self, state: RunState, now_s: float) -> list[Finding] | None:
        """What is so now; None where nothing has come in to judge by, and the look does not count.

        `now_s` is of a clock that stands still while the hub does.
        """


def name_of(state: RunState, rank: int) -> str:
    """``rank 5 (pp1 dp0 tp1)``."""
    hello = state.hellos.get(rank)
    coords = " ".join(f"{axis}{place}" for axis, place in hello.coords.items()) if hello else ""
    return f"rank {rank} ({coords})" if coords else f"rank {rank}"


def names_of(state: RunState, ranks: Sequence[int]) -> str:
    """One rank's name, or ``ranks 1, 3 and 14 more``."""
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
    """The middle of the finite values, the upper of two; NaN of none."""
    ordered = sorted(value for value in values if math.isfinite(value))
    return ordered[len(ordered) // 2] if ordered else math.nan


def spread(values: Sequence[float], middle: float) -> float:
    """The median distance from `middle`, scaled to the standard deviation of a normal distribution (1.4826 MAD)."""
    return 1.4826 * median(abs(value - middle) for value in values)


def compared_with(values: Mapping[K, float]) -> dict[K, float]:
    """What each of some peers is fairly compared with: their median; of two, the other; alone, itself."""
    if len(values) == 2:
        (one, its), (other, others) = values.items()
        return {one: others, other: its}
    return dict.fromkeys(values, median(values.values()))


class NewSummaries:
    """The summaries that came since the last look. `again`: the run was resumed from a checkpoint and repeats steps."""

    def __init__(self) -> None:
        self._last = -1
        self.again = False

    def take(self, summaries: list[Summary]) -> list[Summary]:
        self.again = bool(summaries) and summaries[-1].step < self._last
        if self.again:
            self._last = -1
        start, first = len(summaries), max(0, len(summaries) - AT_ONCE)
        while start > first and summaries[start - 1].step > self._last:
            start -= 1
        self._last = summaries[-1].step if summaries else -1
        return summaries[start:]


def by_gravity(alerts: Iterable[Alert]) -> list[Alert]:
    """The gravest first: by level, then by kind, then the newest."""
    place = {name: number for number, name in enumerate(GRAVITY)}
    return sorted(
        alerts, key=lambda alert: (alert.level != "error", place.get(alert.name, len(GRAVITY)), -alert.time_s)
    )
