"""Where a stage's idle time went, from what every rank of its pipeline measured in one step.

The window is the pipeline's: from its opening to the end of its last rank's last action, the same for all its ranks.
Idle is what of it a rank spent outside actions, and is split without a rest:

- *schedule*: what the rank would idle if the very actions that ran, each as long as it was, were run again in the
  schedule's order with nothing else costing time;
- *wait*: what it slept beyond that, in sends and receives or after its own last action, on other ranks of its pipeline;
- *overhead*: the rest, such as Python between actions and gradient reductions between them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from engine.planner.schedule import ScheduleClock


@dataclass(frozen=True)
class Idle:
    """Shares of the pipeline's window, 0..1; `bubble` is the sum of the other three. `bound` is the bubble, mean over
    ranks, of a simulation of the schedule with the mean times of each stage's actions."""

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
    """How `rank` idled, all in seconds: `durations` of every rank's actions in the order of `clock.acts`, every rank's
    own window, and what `rank` slept between its actions."""
    window = max(windows)
    idle = max(0.0, window - sum(durations[rank]))
    schedule = min(idle, clock.idle(durations)[1][rank])
    asleep = waited + window - windows[rank]
    wait = min(max(0.0, asleep - schedule), idle - schedule)
    overhead = idle - schedule - wait
    bound = clock.bubble(mean_times(clock, durations))
    return Idle(idle / window, schedule / window, wait / window, overhead / window, bound)


def mean_times(clock: ScheduleClock, durations: Sequence[Sequence[float]]) -> dict[str, dict[int, float]]:
    """Of each kind of action on each stage: kind -> stage -> seconds, from those of all ranks' actions in the order of
    `clock.acts`."""
    times: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for acts, its in zip(clock.acts, durations, strict=True):
        for act, time in zip(acts, its, strict=True):
            times[act.kind][act.stage].append(time)
    return {kind: {stage: sum(ts) / len(ts) for stage, ts in by.items()} for kind, by in times.items()}
