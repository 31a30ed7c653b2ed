"""Stores the measured steps of a run, grouped by the knob values that were in force."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from agents.protocol import Summary, Value
from engine.planner.measured import Times

KEPT = 128  # maximum number of steps kept for each set of knob values, the newest
SETS = 64  # maximum number of sets of knob values, and of stretches; the oldest is deleted first
EXCHANGES = ("tp", "cp", "ep", "dp")  # axes with collectives; pp has only point-to-point messages

Values = Mapping[str, Value]
Key = tuple[tuple[str, Value], ...]


def key(values: Values) -> Key:
    """Knob values as a hashable key."""
    return tuple(sorted(values.items()))


@dataclass
class Steps:
    """The newest steps with one set of knob values, in the whole run or in one stretch of steps between two changes."""

    values: Values
    kept: dict[str, deque[float]] = field(default_factory=dict)

    def add(self, quantities: Mapping[str, float | None]) -> None:
        for name, value in quantities.items():
            if value is not None:
                self.kept.setdefault(name, deque(maxlen=KEPT)).append(value)

    def copy(self) -> "Steps":
        return Steps(self.values, {name: kept.copy() for name, kept in self.kept.items()})

    def means(self) -> dict[str, float]:
        return {name: fmean(kept) for name, kept in self.kept.items() if kept}

    @property
    def count(self) -> int:
        return len(self.kept.get("step_ms", ()))

    @property
    def kept_share(self) -> float:
        """Share of (token, expert) pairs that were not dropped, averaged over the steps; 1 if it was not measured."""
        shares = self.kept.get("kept_share")
        return fmean(shares) if shares else 1.0

    @property
    def times_s(self) -> Times:
        return Times([ms / 1e3 for ms in self.kept.get("step_ms", ())])


def quantities(summary: Summary) -> dict[str, float | None]:
    """The measured values of a step for the quantities that a preview predicts."""
    return {
        "step_ms": summary.step_ms,
        "bubble": summary.bubble,
        "bubble_bound": summary.bubble_bound,
        "comm_bytes": sum(lane.bytes for axis, lane in summary.comm.items() if axis != "control"),
        "a2a_bytes": summary.a2a_bytes,
        "dropped": summary.dropped,
        **{f"{axis}_bytes": lane.bytes for axis, lane in summary.comm.items()},
    }


def parts(summary: Summary, busy_s: float | None, loads: Sequence[Sequence[int]]) -> dict[str, float | None]:
    """For one step: the seconds in exposed collectives, the seconds before and after the pipeline runs, and the share
    of (token, expert) pairs that were not dropped. `busy_s` is the time in forward and backward passes."""
    exposed = [lane.exposed_ms for axis, lane in summary.comm.items() if axis in EXCHANGES]
    if busy_s is not None and summary.bubble is not None and summary.bubble < 1:
        busy_s /= 1 - summary.bubble
    pairs = sum(map(sum, loads))
    return {
        "exchange_s": sum(exposed) / 1e3 if exposed else None,
        "outside_s": None if busy_s is None else max(0.0, summary.step_ms / 1e3 - busy_s),
        "kept_share": 1 - (summary.dropped or 0) / pairs if pairs else None,
    }
