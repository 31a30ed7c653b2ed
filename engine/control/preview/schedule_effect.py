"""Predicts the effect of other knob values on the pipeline, by simulating the schedule with the action times of this
run."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.protocol import Estimate
from engine.config.layout import Layout
from engine.config.schedule_traits import SCHEDULES
from engine.planner.idle_time import mean_times
from engine.planner.measured import Times
from engine.planner.refit import LIKELY, UNCOUNTED
from engine.planner.schedule import ScheduleClock
from engine.planner.timing.step import Prediction

Costs = dict[str, dict[int, float]]
"""Seconds of an action: kind -> stage -> mean."""

AVERAGED = 32  # number of steps whose action times are kept
FEW = 5  # number of steps in a block, whose mean counts as one measurement of the bubble
VARIES = 0.03  # relative error of a simulated bubble, besides the variation of action times
# Standard error of the step time if the actions run in another order, over the step time: their durations then change,
# for example because more activations are in memory. Measured between 1f1b and gpipe (docs/measurements.md).
REORDERED = 0.15
NO_STEPS = "no data: this run had no step with these values"
SIMULATED = "the schedule, simulated with this run's action times"


@dataclass(frozen=True)
class Plan:
    """A schedule and its number of micro-batches."""

    name: str
    micro_batches: int

    @property
    def splits(self) -> bool:
        return SCHEDULES[self.name].split_backward


class ActionTimes:
    """The action times of a pipeline's newest steps, by number of micro-batches and by whether the backward pass is
    split."""

    def __init__(self) -> None:
        # (whether the backward pass is split, micro-batches) -> action times.
        self._costs: dict[tuple[bool, int], deque[Costs]] = {}

    def add(self, clock: ScheduleClock, durations: Sequence[Sequence[float]]) -> None:
        """Add the measured durations of one step's actions, in the same order as the actions in `clock.acts`."""
        micro_batches = 1 + max(act.micro_batch for act in clock.acts[0])
        splits = any(act.kind == "W" for acts in clock.acts for act in acts)
        newest = self._costs.setdefault((splits, micro_batches), deque(maxlen=AVERAGED))
        newest.append(mean_times(clock, durations))

    def copy(self) -> "ActionTimes":
        other = ActionTimes()
        other._costs = {plan: newest.copy() for plan, newest in self._costs.items()}
        return other

    def of(self, plan: Plan) -> list[Costs]:
        """The action times of the recorded steps that match `plan` in two respects: the number of micro-batches, and
        whether backward passes are split."""
        return list(self._costs.get((plan.splits, plan.micro_batches), ()))


class ScheduleEffect:
    """Predicts how a change of knob values affects the bubble and the step time, by simulating the pipeline schedule
    before and after the change. `times`: the measured durations of this run's pipeline actions."""

    def __init__(self, layout: Layout, times: ActionTimes, before: Plan, after: Plan) -> None:
        self._before, self._after, self._times = before, after, times
        self._clocks = tuple(
            ScheduleClock(plan.name, layout.grid.pp, layout.virtual_stages, plan.micro_batches)
            for plan in (before, after)
        )
        self._costs = [costs for one in times.of(before) if (costs := _with_all_kinds(one))]

    def bubbles(
        self, now: Mapping[str, float], before: Prediction, after: Prediction, only_cut: bool
    ) -> dict[str, Estimate]:
        """Estimates of `bubble`, the measured idle share of the pipeline, and of `bubble_bound`, the idle share in a
        simulation of the schedule alone. `only_cut`: whether no knob changes except the schedule and the number of
        micro-batches. Otherwise the measured action times of each stage are scaled by a ratio: the planner's prediction
        for the new knob values divided by its prediction for the old ones."""
        bound_now, here = now.get("bubble_bound"), now.get("bubble")
        if not self._costs:
            return {}
        costs = self._costs if only_cut else [_as_planned(one, before, after) for one in self._costs]
        # Each step is simulated, because the mean of the bubbles is larger than the bubble of mean action times.
        old = float(_simulated(self._clocks[0], self._costs).bubbles.mean())
        simulated = Times(_simulated(self._clocks[1], costs).bubbles.tolist(), FEW)
        new = simulated.mean
        source = SIMULATED if only_cut else f"{SIMULATED}, with action times scaled as the planner predicts"
        reach = LIKELY * (simulated.noise**2 + (VARIES * new) ** 2) ** 0.5
        low, high = max(0.0, new - reach), min(1.0, new + reach)
        found = {"bubble_bound": Estimate("bubble_bound", bound_now, new, low, high, source)}
        if here is not None:
            rest = max(0.0, here - old)
            # Idle time outside the schedule either stays the same or grows with the number of micro-batches.
            more = max(1.0, self._after.micro_batches / self._before.micro_batches)
            source = f"{source}; other idle time unchanged or longer"
            found["bubble"] = Estimate("bubble", here, new + rest, low, high + rest * more, source)
        return found

    def step(self, now_ms: float | None, noise_ms: float) -> Estimate | None:
        """Predict the interval of the step time after the change. At one end of the interval, action times are assumed
        to be proportional to the size of the micro-batches; at the other end, they are assumed not to depend on this
        size. If the run has measured action times for micro-batches of the new size, the interval is extended to
        include the step time simulated with those times. `noise_ms` is the standard error of the difference between the
        mean step time before the change and a mean step time measured after it."""
        if now_ms is None or not self._costs:
            return None
        shrink = self._before.micro_batches / self._after.micro_batches
        base = now_ms - _window_ms(self._clocks[0], self._costs)
        times = [
            base + _window_ms(self._clocks[1], [_scaled(one, by) for one in self._costs])
            for by in (shrink, 1.0)
        ]
        other = self._times.of(self._after) if shrink != 1 else []
        guess = base + _window_ms(self._clocks[1], other) if other else times[0]
        bound = "lower" if shrink > 1 else "upper"
        how = f", scaled with the size of micro-batches; the {bound} bound assumes unchanged times"
        if shrink == 1 or other:
            how = ", of micro-batches of the same size"
        low, high = min(*times, guess), max(*times, guess)
        reordered = REORDERED if self._before.name != self._after.name else 0.0
        low -= max(UNCOUNTED * low, LIKELY * hypot(noise_ms, reordered * low))
        high += max(UNCOUNTED * high, LIKELY * hypot(noise_ms, reordered * high))
        return Estimate("step_ms", now_ms, guess, max(0.0, low), high, f"{SIMULATED}{how}")


def _with_all_kinds(costs: Costs) -> Costs | None:
    """Fill in the times of the full backward pass (B) or of its two halves (I, W) that were not measured. The action
    times were measured with the schedule before the change. If only one of the schedules before and after the change
    splits the backward pass, the simulation of the new schedule needs times that the old one does not have. A missing B
    is set to I + W, and a missing I or W to half of B. Returns None if a stage has neither B nor both I and W."""
    whole, halves = costs.get("B", {}), [costs.get("I", {}), costs.get("W", {})]
    found: Costs = {"F": costs["F"], "B": {}, "I": {}, "W": {}}
    for stage in costs["F"]:
        parts = [half.get(stage) for half in halves]
        both = whole.get(stage)
        if both is None:
            if parts[0] is None or parts[1] is None:
                return None
            both = parts[0] + parts[1]
        found["B"][stage] = both
        found["I"][stage] = both / 2 if parts[0] is None else parts[0]
        found["W"][stage] = both / 2 if parts[1] is None else parts[1]
    return found


def _as_planned(costs: Costs, before: Prediction, after: Prediction) -> Costs:
    ratios = {
        "F": [new / old if old else 1.0 for new, old in zip(after.forward, before.forward, strict=True)],
        "B": [new / old if old else 1.0 for new, old in zip(after.backward, before.backward, strict=True)],
    }
    return {
        kind: {stage: time * ratios["F" if kind == "F" else "B"][stage] for stage, time in its.items()}
        for kind, its in costs.items()
    }


class _Simulated(NamedTuple):
    """For each simulated step, `windows`: the seconds from the start of the pipeline to the end of its last action;
    `bubbles`: the share of this time in which a rank is idle (0 to 1), averaged over the ranks."""

    windows: NDArray[np.float64]
    bubbles: NDArray[np.float64]


def _simulated(clock: ScheduleClock, steps: Sequence[Costs]) -> _Simulated:
    """Simulate one step for each entry of `steps`. An entry holds the action times of one step."""
    times = {
        (kind, stage): np.array([costs[kind][stage] for costs in steps])
        for kind, of in steps[0].items()
        for stage in of
    }
    durations = [np.stack([times[act.kind, act.stage] for act in its]) for its in clock.acts]
    windows = np.max([ends[-1] for ends in clock.ends(durations)], axis=0)
    busy = np.mean([own.sum(axis=0) for own in durations], axis=0)
    return _Simulated(
        windows, np.divide(windows - busy, windows, out=np.zeros_like(windows), where=windows > 0)
    )


def _window_ms(clock: ScheduleClock, steps: Sequence[Costs]) -> float:
    """The mean time from the start of the pipeline to the end of its last action in the simulated steps, in ms."""
    return 1e3 * float(_simulated(clock, steps).windows.mean())


def _scaled(costs: Costs, by: float) -> Costs:
    return {kind: {stage: time * by for stage, time in its.items()} for kind, its in costs.items()}
