"""Splits a rank's idle time in the pipeline by cause, from the measured times of all ranks of the pipeline.

A rank's idle time in a step is the time in which it runs no action, between the start of the pipeline and the end of
the last action on any rank of the pipeline. This interval is the same for all ranks of the pipeline. Three causes add
up to the idle time:

- *schedule*: the idle time in a simulation of the schedule with the measured duration of each action and no other cost;
- *wait*: the additional time in which the rank waits for other stages, during sends and receives or after its last
action;
- *overhead*: the rest, such as Python code and gradient reductions between actions.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from engine.planner.schedule import ScheduleClock


@dataclass(frozen=True)
class Idle:
    """A rank's idle time in a step, by cause, as fractions of the time from the start of the pipeline to the end of the
    last action on any of its ranks. `bubble` is schedule + wait + overhead. `bound` is the mean bubble over ranks in a
    simulated schedule in which every action takes the mean measured duration of its kind on its stage."""

    PARTS: ClassVar = ("schedule", "wait", "overhead")
    SHARES: ClassVar = ("bubble", *PARTS, "bound")

    bubble: float
    schedule: float
    wait: float
    overhead: float
    bound: float

    @property
    def parts(self) -> dict[str, float]:
        return {part: getattr(self, part) for part in self.PARTS}


def split_idle(
    clock: ScheduleClock,
    rank: int,
    durations: Sequence[Sequence[float]],
    windows: Sequence[float],
    waited: float,
) -> Idle:
    """Split the idle time of `rank` by cause. All times are in seconds. `durations`: for each rank, the durations of
    its actions in the order of `clock.acts`. `windows`: for each rank, the time from the start of the pipeline to the
    end of its own last action. `waited`: the time for which `rank` waited for other stages between its actions."""
    window = max(windows)
    idle = max(0.0, window - sum(durations[rank]))
    schedule = min(idle, clock.idle(durations)[1][rank])
    asleep = waited + window - windows[rank]
    wait = min(max(0.0, asleep - schedule), idle - schedule)
    overhead = idle - schedule - wait
    bound = clock.bubble(mean_times(clock, durations))
    return Idle(idle / window, schedule / window, wait / window, overhead / window, bound)


def mean_times(clock: ScheduleClock, durations: Sequence[Sequence[float]]) -> dict[str, dict[int, float]]:
    """Mean duration of each kind of action on each stage: kind -> stage -> seconds. `durations`: for each rank, the
    durations of its actions in the order of `clock.acts`."""
    times: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for acts, seconds in zip(clock.acts, durations, strict=True):
        for act, time in zip(acts, seconds, strict=True):
            times[act.kind][act.stage].append(time)
    return {kind: {stage: sum(ts) / len(ts) for stage, ts in by.items()} for kind, by in times.items()}
