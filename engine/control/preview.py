"""Predicts the effect of a change of knobs from measurements of this run. Without such measurements it gives no number.

A prediction is an interval, and also a single value if the interval is narrow (`Estimate.point`). The sources, in order
of preference: the current value, if the knob does not affect the quantity; measurements of earlier steps of this run
that had the requested knob values; a simulation of the schedule with the current times of the pipeline's actions
(`engine.planner.schedule`).
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from msgspec import structs

from agents.protocol import Changes, Estimate, Previewed, Step, Summary, Value
from agents.rank.knob_board import KnobBoard
from engine.config.layout import Layout
from engine.config.schedule_traits import SCHEDULES
from engine.planner.idle_time import mean_times
from engine.planner.schedule import ScheduleClock

SETTLING = 2  # number of steps ignored after a change
KEPT = 128  # number of newest steps kept per set of knob values
SETS = 64  # maximum number of sets of knob values; the oldest set is dropped first
MIN_STEPS = 4  # minimum number of measured steps for a prediction

QUANTITIES = ("step_ms", "bubble", "bubble_bound", "memory_bytes", "comm_bytes", "a2a_bytes", "dropped")
WALL_TIMES = {"step_ms", "bubble"}
TIMES = {*WALL_TIMES, "bubble_bound"}
SHARED_CORES = "no data: ranks share cores, so a step's time depends on the other ranks; a trial measures it"
ROUTED = {"a2a_bytes", "dropped"}
OPTIMIZER_KNOBS = {
    "lr_scale",
    "grad_clip",
}  # only the optimizer reads these knobs, so they do not change the time of a step

Values = Mapping[str, Value]
Costs = dict[str, dict[int, float]]
"""Seconds of an action: kind -> stage -> mean."""


@dataclass
class _Seen:
    """Measurements with one set of knob values."""

    steps: int = 0
    kept: dict[str, deque[float]] = field(default_factory=dict)

    def add(self, quantities: Mapping[str, float | None]) -> None:
        for name, value in quantities.items():
            if value is not None:
                self.kept.setdefault(name, deque(maxlen=KEPT)).append(value)


class Previewer:
    """Answers preview queries on the leader. The trainer records steps with `note`; queries arrive on another
    thread."""

    def __init__(self, layout: Layout, board: KnobBoard, oversubscribed: bool) -> None:
        self._layout, self._board, self._oversubscribed = layout, board, oversubscribed
        self._lock = threading.Lock()  # held only during a few dictionary operations
        self._seen: dict[tuple[tuple[str, Value], ...], _Seen] = {}
        self._memory: float | None = None
        self._costs: dict[tuple[bool, int], Costs] = {}  # newest costs by (split backward, micro-batches)

    def note(self, summary: Summary) -> None:
        """Record a step of the whole job."""
        with self._lock:
            seen = self._seen.setdefault(_key(summary.knobs), _Seen())
            seen.steps += 1
            if seen.steps > SETTLING:
                seen.add(_quantities(summary) | {"memory_bytes": self._memory})
            if len(self._seen) > SETS:
                del self._seen[next(iter(self._seen))]

    def note_rank(
        self, record: Step, clock: ScheduleClock, durations: Sequence[Sequence[float]] | None
    ) -> None:
        """Record the leader's own step, and the times of the actions of its pipeline in the order of `clock.acts`."""
        with self._lock:
            self._memory = record.memory_bytes
            if durations:
                micro_batches = 1 + max(act.micro_batch for act in clock.acts[0])
                self._costs[_splits(clock), micro_batches] = mean_times(clock, durations)

    def __call__(self, changes: Changes) -> Previewed:
        """Predict the effect of `changes`. Raises ValueError, one sentence, if the changes are not legal."""
        self._board.check(changes)
        values = self._board.values
        would_be = values | {name: value for name, value in changes.items() if name in values}
        with self._lock:
            now = _means(self._seen.get(_key(values)))
            then = self._seen.get(_key(would_be))
            known = {name: list(kept) for name, kept in then.kept.items()} if then else {}
            costs = dict(self._costs)
        neutral = all(knob.loss_neutral for knob in self._board.states() if knob.name in changes)
        turned = {name for name, value in would_be.items() if values[name] != value}
        estimates = []
        for quantity in QUANTITIES:
            here = now.get(quantity)
            if actions := [name for name in changes if name not in values]:
                found = Estimate(quantity, here, source=f"no data: the cost of {actions[0]} is not predicted")
            elif self._untouched(quantity, turned, would_be):
                found = Estimate(
                    quantity, here, here, source=f"{', '.join(sorted(turned)) or 'it'} does not affect it"
                )
            elif quantity in WALL_TIMES and self._oversubscribed:
                found = Estimate(quantity, here, source=SHARED_CORES)
            elif len(known.get(quantity, ())) >= MIN_STEPS:
                found = _measured(quantity, here, known[quantity])
            else:
                found = self._simulated(quantity, now, values, would_be, turned, costs)
            estimates.append(structs.replace(found, after=found.point))
        return Previewed("", changes, self._board.revision, "", neutral, estimates)

    def _untouched(self, quantity: str, turned: set[str], would_be: Values) -> bool:
        """Whether the changed knobs `turned` have no immediate effect on `quantity`."""
        if turned <= OPTIMIZER_KNOBS:
            # The optimizer changes the weights, and the number of dropped pairs depends on them.
            return quantity != "dropped"
        cut = turned <= {"micro_batches", "schedule"}
        if quantity in ROUTED:
            return cut or (
                turned <= {"micro_batches", "schedule", "recompute", "zero"} and quantity == "dropped"
            )
        # The number of micro-batches does not change the bytes, unless each micro-batch gathers or reduces weights.
        once = self._zero(would_be) <= (2 if self._layout.grid.pp > 1 else 1)
        return quantity == "comm_bytes" and cut and once

    def _zero(self, values: Values) -> int:
        return int(str(values.get("zero", self._layout.train.zero)))

    def _simulated(
        self,
        quantity: str,
        now: Mapping[str, float],
        values: Values,
        would_be: Values,
        turned: set[str],
        costs: Mapping[tuple[bool, int], Costs],
    ) -> Estimate:
        here = now.get(quantity)
        nothing = Estimate(quantity, here, source="no data: this run had no step with these values")
        if quantity == "dropped" and turned == {"capacity_factor"} and would_be["capacity_factor"] is None:
            return Estimate(quantity, here, 0.0, 0.0, 0.0, "without a limit nothing is dropped")
        if quantity not in TIMES or not turned <= {"micro_batches", "schedule"}:
            return nothing
        before, after = self._plan(values), self._plan(would_be)
        measured = costs.get((_split(before), before[1]))
        if measured is None or _split(before) != _split(after):
            return nothing
        clocks = [
            ScheduleClock(name, self._layout.grid.pp, self._layout.virtual_stages, m)
            for name, m in (before, after)
        ]
        shrink = before[1] / after[1]
        # The time of an action with another micro-batch size is between two bounds: proportional to the size, and
        # equal.
        ends = [_window(clocks[1], _scaled(measured, by)) for by in (shrink, 1.0)]
        bound, bound_now = (clock.bubble(measured) for clock in (clocks[1], clocks[0]))
        source = "the schedule, simulated with this run's action times"
        if quantity == "bubble_bound":
            return Estimate(quantity, here, bound, source=source)
        if here is None:
            return nothing
        if quantity == "bubble":
            rest = max(0.0, here - bound_now)
            # Idle time outside the schedule is between two bounds: unchanged, and proportional to the number of
            # micro-batches.
            likely, most = bound + rest, bound + rest * max(1.0, after[1] / before[1])
            return Estimate(quantity, here, likely, bound, most, f"{source}; other idle time as now, or more")
        base = here - 1e3 * _window(clocks[0], measured)
        other = costs.get((_split(after), after[1]))
        times = [base + 1e3 * end for end in ends]
        guess = base + 1e3 * _window(clocks[1], other) if other else times[0]
        how = "of the same size" if other else "in proportion to their size; at most, not at all smaller"
        if shrink > 1:
            how = "of the same size" if other else "in proportion to their size; at least, not at all larger"
        return Estimate(quantity, here, guess, min(times), max(times), f"{source}, taken {how}")

    def _plan(self, values: Values) -> tuple[str, int]:
        return str(values.get("schedule", self._layout.schedule.name)), int(str(values["micro_batches"]))


def _key(values: Values) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted(values.items()))


def _quantities(summary: Summary) -> dict[str, float | None]:
    return {
        "step_ms": summary.step_ms,
        "bubble": summary.bubble,
        "bubble_bound": summary.bubble_bound,
        "comm_bytes": sum(lane.bytes for axis, lane in summary.comm.items() if axis != "control"),
        "a2a_bytes": summary.a2a_bytes,
        "dropped": summary.dropped,
    }


def _means(seen: _Seen | None) -> dict[str, float]:
    return {name: fmean(kept) for name, kept in seen.kept.items() if kept} if seen else {}


def _measured(quantity: str, now: float | None, steps: list[float]) -> Estimate:
    """The interval that contains the middle 95 % of the steps, or all steps if there are fewer than 40."""
    ordered, out = sorted(steps), len(steps) // 40
    source = f"measured in this run: {len(steps)} steps with these values"
    return Estimate(quantity, now, fmean(steps), ordered[out], ordered[-1 - out], source)


def _window(clock: ScheduleClock, costs: Costs) -> float:
    """Time of the pipeline in a step, in seconds."""
    return clock.idle([[costs[act.kind][act.stage] for act in its] for its in clock.acts])[0]


def _scaled(costs: Costs, by: float) -> Costs:
    return {kind: {stage: time * by for stage, time in its.items()} for kind, its in costs.items()}


def _split(plan: tuple[str, int]) -> bool:
    return SCHEDULES[plan[0]].split_backward


def _splits(clock: ScheduleClock) -> bool:
    return any(act.kind == "W" for its in clock.acts for act in its)
