"""Predicts the effect of knob changes from measurements of this run.

A prediction is an interval, and also a single value if the interval is narrow (`Estimate.point`). Each quantity, such
as the step time, is predicted in one of these ways; if none is possible, it is not predicted:

- the current value, if the knob does not affect the quantity;
- a formula that gives the quantity exactly (memory, traffic);
- earlier steps of this run with the requested values;
- a simulation of the schedule with the current times of the pipeline's actions;
- the planner's prediction, with factors that are fitted to the step times of this run.

The preview of each applied change is checked against the steps that follow it (`verification.py`).
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from msgspec import structs

from agents.protocol import Changes, Estimate, Event, Previewed, Summary
from agents.rank.knob_board import KnobBoard
from engine.config.layout import Layout
from engine.config.relayout import KNOB
from engine.control.preview.measured_steps import SETS, Key, Steps, Values, key, parts, quantities
from engine.control.preview.planned_effect import REFITTED, PlannedEffect
from engine.control.preview.run_level import Stretch, predict_again
from engine.control.preview.schedule_effect import NO_STEPS, ActionTimes, Plan, ScheduleEffect
from engine.control.preview.verification import SETTLING, Verification
from engine.planner.hardware.description import Hardware
from engine.planner.measured import imbalance
from engine.planner.schedule import ScheduleClock
from engine.planner.what_if import machine_of_run
from engine.planner.workload.job import Job

FITTED = 16  # the planner is fitted to the steps of at most this number of sets of knob values, the newest
MIN_STEPS = 4  # minimum number of measured steps for a prediction from them

QUANTITIES = (
    "step_ms",
    "bubble",
    "bubble_bound",
    "memory_bytes",
    "peak_bytes",
    "comm_bytes",
    "a2a_bytes",
    "dropped",
)
AXIS_BYTES = ("tp_bytes", "cp_bytes", "pp_bytes", "dp_bytes")  # in a preview only if the change affects them
WALL_TIMES = {"step_ms", "bubble"}
FORMULAS = {"memory_bytes", "peak_bytes", *AXIS_BYTES}
SHARED_CORES = "no data: ranks share cores, so a step's time depends on the other ranks"
OWN_MODEL = "no data: the planner does not know your own model"
TRIAL = "; a trial measures it"  # appended to these, except for a new layout, which cannot be tried
# Only the optimizer reads these knobs, so the work of a step does not change.
OPTIMIZER_KNOBS = {"lr_scale", "grad_clip"}
LOSS_KNOBS = {"aux_loss_coef", "z_loss_coef", "bias_rate"}  # these knobs change only a few router operations
LEAST_SHARE = 0.01  # minimum share of kept pairs in a ratio, so that no division is by zero
CUT = {"micro_batches", "schedule"}
PASSES = {"none": 2, "selective": 2, "full": 3}
"""Number of times that a step sends each row to the experts and back, by recompute mode (docs/evidence/bytes.md)."""


@dataclass(frozen=True)
class _Change:
    """A change to preview: the knob values before and after the change, and a copy of the measurements at the time of
    the query. `seen`: the measured steps, grouped by knob values. `stretches`: one entry for each stretch of steps
    between two changes, newest last. `present`: the newest steps with the values that are in force before the
    change."""

    before: Values
    after: Values
    seen: dict[Key, Steps]
    stretches: Sequence[Steps]
    present: Steps
    times: ActionTimes
    loads: Sequence[Sequence[int]]
    turned: set[str]
    now: Mapping[str, float]


class Previewer:
    """Answers preview queries on the leader. The training thread records steps with `note`; another thread queries the
    previewer.

    `hardware` is the planner's description of the machine; by default, that of the layout's [hardware] section or,
    without one, of a CPU core. `resident`: whether `memory_bytes` is the resident memory of the process.
    """

    def __init__(
        self,
        layout: Layout,
        board: KnobBoard,
        oversubscribed: bool,
        hardware: Hardware | None = None,
        resident: bool = False,
    ) -> None:
        self._layout, self._board, self._oversubscribed = layout, board, oversubscribed
        self._planner = PlannedEffect(layout, hardware or machine_of_run(layout, "cpu"), resident)
        self._lock = threading.Lock()  # this lock is held only for a few dictionary operations
        self._seen: dict[Key, Steps] = {}
        self._stretches: deque[Steps] = deque(maxlen=SETS)
        self._times = ActionTimes()
        self._newest: tuple[ScheduleClock, Sequence[Sequence[float]]] | None = None
        self._memory: float | None = None
        self._busy_s: float | None = None
        self._loads: Sequence[Sequence[int]] = ()
        self._values: Values | None = None  # knob values of the newest step
        self._steps = 0  # number of steps since the last change
        self._verification = Verification()

    # ---------------------------------------------------------------------------------------- recording

    def note(self, summary: Summary, loads: Sequence[Sequence[int]] = ()) -> None:
        """Record the summary of a step of the whole job. `loads[layer][expert]` is the number of (token, expert)
        pairs."""
        measured = quantities(summary) | {"memory_bytes": self._memory}
        self._check(summary, measured)
        with self._lock:
            if self._newest:
                self._times.add(*self._newest)
                self._newest = None
            if any(map(any, loads)):
                self._loads = loads
            self._steps += 1
            seen = self._seen.pop(key(summary.knobs), None) or Steps(summary.knobs)
            self._seen[key(summary.knobs)] = seen  # the newest is last
            if self._steps == 1:
                self._stretches.append(Steps(summary.knobs))
            if self._steps > SETTLING:
                step = measured | parts(summary, self._busy_s, loads)
                seen.add(step)
                self._stretches[-1].add(step)
            if len(self._seen) > SETS:
                del self._seen[next(iter(self._seen))]

    def note_rank(
        self,
        memory_bytes: int | None,
        clock: ScheduleClock,
        durations: Sequence[Sequence[float]] | None,
        busy_s: float | None = None,
    ) -> None:
        """Record measurements of one step of the leader: its memory, the times of its pipeline's actions (ordered as in
        `clock.acts`), and its seconds in forward and backward passes. Call this before `note` for the same step."""
        with self._lock:
            self._memory = memory_bytes
            self._busy_s = busy_s
            if durations:
                self._newest = clock, durations
                self._busy_s = max(map(sum, durations))

    def take_events(self) -> list[Event]:
        """Events for the run's log: the results of comparing previews with measured steps, since the last call."""
        events, self._verification.events = self._verification.events, []
        return events

    def _check(self, summary: Summary, measured: Mapping[str, float | None]) -> None:
        """Compare the measurements of a training step with the preview of the newest change. If this is the first step
        with changed knob values, first compute a preview of the change from the steps before it; this step and later
        ones are compared with this preview."""
        old, self._values = self._values, summary.knobs
        if old is not None and old != summary.knobs:
            self._steps = 0
            changes = {name: (old.get(name), to) for name, to in summary.knobs.items() if old.get(name) != to}
            self._verification.begin(summary.revision, changes, self._moved(old, summary.knobs))
        self._verification.note(measured)

    def _moved(self, before: Values, after: Values) -> list[Estimate]:
        """Estimates of the quantities that change when the knob values change from `before` to `after`."""
        try:
            change = self._change(before, after)
            return [one for one in self._estimates(change) if not self._untouched(one.quantity, change)]
        except Exception:  # noqa: BLE001 - an error costs a check of a preview, not the run
            return []

    # ---------------------------------------------------------------------------------------- answering

    def __call__(self, changes: Changes) -> Previewed:
        """The predicted effect of `changes`. Raises ValueError if the changes are not legal."""
        self._board.check(changes)
        values = self._board.values
        would_be = values | {name: value for name, value in changes.items() if name in values}
        change = self._change(values, would_be)
        neutral = all(knob.loss_neutral for knob in self._board.states() if knob.name in changes)
        if actions := [name for name in changes if name not in values]:
            source = f"no data: the cost of {actions[0]} is not predicted"
            estimates = [Estimate(one, change.now.get(one), source=source) for one in QUANTITIES]
        else:
            estimates = self._estimates(change)
        shown = [structs.replace(one, after=one.point) for one in estimates]
        return Previewed("", changes, self._board.revision, "", neutral, shown)

    def _change(self, before: Values, after: Values) -> _Change:
        with self._lock:
            seen = {name: steps.copy() for name, steps in self._seen.items()}
            stretches = [one.copy() for one in self._stretches if one.count >= MIN_STEPS]
            times, loads = self._times.copy(), self._loads
        present = seen.get(key(before)) or Steps(before)
        if stretches and key(stretches[-1].values) == key(before):
            present = stretches[-1]  # older steps with these values may have been slower or faster
        turned = {name for name, value in after.items() if before.get(name) != value}
        return _Change(before, after, seen, stretches, present, times, loads, turned, present.means())

    def _estimates(self, change: _Change) -> list[Estimate]:
        """One estimate for each of `QUANTITIES`, and one for each of `AXIS_BYTES` that changes. The field `after` of an
        estimate is the likely value, even if the interval is wide."""
        planned = self._planned(change)
        known = change.seen[key(change.after)].kept if key(change.after) in change.seen else {}
        words = ", ".join(sorted(change.turned)) or "this change"
        trial = "" if KNOB in change.turned else TRIAL
        found = []
        for quantity in (*QUANTITIES, *(one for one in AXIS_BYTES if one in planned)):
            here = change.now.get(quantity)
            steps = known.get(quantity, ())
            if self._untouched(quantity, change) and quantity != "peak_bytes":
                found.append(Estimate(quantity, here, here, source=f"not affected by {words}"))
            elif quantity in WALL_TIMES and self._oversubscribed:
                found.append(Estimate(quantity, here, source=SHARED_CORES + trial))
            elif quantity == "step_ms" and key(change.after) in {key(one.values) for one in change.stretches}:
                found.append(_measured_step(change, here, len(steps)))
            elif len(steps) >= MIN_STEPS and quantity not in (*FORMULAS, "step_ms"):
                found.append(_measured(quantity, here, list(steps)))
            else:
                unknown = f"{OWN_MODEL}{trial}" if self._layout.model.own else NO_STEPS
                found.append(planned.get(quantity) or Estimate(quantity, here, source=unknown))
        return found

    def _untouched(self, quantity: str, change: _Change) -> bool:
        """Whether `quantity` is the same right after the change as before it."""
        turned = change.turned
        if turned <= OPTIMIZER_KNOBS:
            return quantity != "dropped"  # dropping depends on the weights, which change
        cut = turned <= CUT
        if quantity == "a2a_bytes":
            modes = {PASSES.get(str(values.get("recompute")), 0) for values in (change.before, change.after)}
            return cut or (turned <= {*CUT, "recompute", "zero"} and len(modes) == 1)
        return quantity == "dropped" and turned <= {*CUT, "recompute", "zero"}

    # ------------------------------------------------------------------------------------------ planning

    def _planned(self, change: _Change) -> dict[str, Estimate]:
        """Estimates that need no measurements with the new knob values. Memory and traffic are computed with formulas,
        and the bubble by a simulation of the pipeline schedule. The step time comes from this simulation or from the
        planner, whose times are scaled to match the run's measured steps."""
        if self._layout.model.own:
            return {}
        planner, now = self._planner, change.now
        uneven = imbalance(change.loads, self._layout.grid.ep)
        before, after = planner.job(change.before, uneven), planner.job(change.after, uneven)
        found = {
            "memory_bytes": planner.memory(now.get("memory_bytes"), before, after),
            "peak_bytes": planner.peak(before, after),
        }
        present = kept = change.present.kept_share
        shares = None
        if "capacity_factor" in change.turned:
            drops = planner.dropped(now.get("dropped"), change.before, change.after, change.loads)
            pairs = sum(map(sum, change.loads))
            if drops and drops.after is not None:
                found["dropped"] = drops
            if drops and pairs and drops.interval and drops.after is not None:
                kept = 1 - drops.after / pairs
                most, least = ((1 - end / pairs) / max(present, LEAST_SHARE) for end in drops.interval)
                shares = least, kept / max(present, LEAST_SHARE), most
        rows = self._rows(change, shares)
        if rows:
            found["a2a_bytes"] = rows
        if rows or not self._layout.model.moe:
            found |= planner.traffic(now, before, after, rows or Estimate("a2a_bytes", 0.0, 0.0))
        if change.turned & LOSS_KNOBS or ("capacity_factor" in change.turned and not change.loads):
            return found
        if self._layout.grid.pp > 1 and KNOB not in change.turned:
            plans = [self._plan(values) for values in (change.before, change.after)]
            effect = ScheduleEffect(self._layout, change.times, plans[0], plans[1])
            only_cut = change.turned <= CUT
            found |= effect.bubbles(now, planner.prediction(before), planner.prediction(after), only_cut)
            noise_ms = 1e3 * change.present.times_s.noise if change.present.count else 0.0
            bounds = effect.step(now.get("step_ms"), noise_ms) if only_cut else None
        else:
            bounds = None
        # If only the schedule changes, the simulation with measured times is more precise than the planner.
        only_schedule = bounds is not None and change.turned == {"schedule"}
        if step := bounds if only_schedule else self._step(change, kept, bounds) or bounds:
            found["step_ms"] = step
        return found

    def _step(self, change: _Change, kept: float, bounds: Estimate | None) -> Estimate | None:
        """Predict the step time with the fitted planner. The prediction is clamped to the interval `bounds`, which
        comes from a simulation of the schedule. `kept` is the share of (token, expert) pairs that are not dropped after
        the change."""
        present = change.present
        runs = [one for one in change.seen.values() if one.count >= MIN_STEPS][-FITTED:]
        if present.count < MIN_STEPS:
            return None
        factors = self._planner.fitted(
            [(self._timed_job(change, one.values, one.kept_share), one) for one in runs]
        )
        if factors is None:
            return None
        before = self._timed_job(change, change.before, present.kept_share)
        after = self._timed_job(change, change.after, kept)
        wrong = self._verification.error_of_change("step_ms")
        span = self._planner.step(present.times_s, before, after, factors, wrong)
        low, likely, high = (1e3 * max(0.0, seconds) for seconds in span)
        source = REFITTED.format(f"{len(runs)} set{'s' * (len(runs) > 1)} of values")
        if bounds and bounds.low is not None and bounds.high is not None:
            if high <= bounds.low or low >= bounds.high:
                return bounds
            low, high = max(low, bounds.low), min(high, bounds.high)
            source += ", within the bounds of the simulated schedule"
        return Estimate("step_ms", change.now.get("step_ms"), min(max(likely, low), high), low, high, source)

    def _timed_job(self, change: _Change, values: Values, kept: float) -> Job:
        return self._planner.job(values, imbalance(change.loads, self._layout.grid.ep), kept)

    def _rows(self, change: _Change, kept: tuple[float, float, float] | None) -> Estimate | None:
        """Predict the all-to-all bytes, which are proportional to the number of passes (forward, backward and
        recomputed) and to the number of (token, expert) pairs that are not dropped. `kept`: the minimum, likely and
        maximum factor by which the change multiplies the number of these pairs."""
        here = change.now.get("a2a_bytes")
        modes = [PASSES.get(str(values.get("recompute")), 0) for values in (change.before, change.after)]
        if here is None or not all(modes) or KNOB in change.turned:
            return None
        here_then = here * modes[1] / modes[0]
        source = "closed form: the passes of forward and backward"
        if "capacity_factor" not in change.turned:
            return Estimate("a2a_bytes", here, here_then, source=source)
        if kept is None:
            return None
        low, likely, high = (here_then * share for share in kept)
        return Estimate("a2a_bytes", here, likely, low, high, "pairs that are not dropped")

    def _plan(self, values: Values) -> Plan:
        name = str(values.get("schedule", self._layout.schedule.name))
        return Plan(name, int(str(values["micro_batches"])))


def _measured_step(change: _Change, now: float | None, count: int) -> Estimate:
    """Predict the step time for knob values that were in force earlier in the run, based on the run's current baseline
    (`run_level.py`)."""
    stretches = [Stretch(key(one.values), one.times_s) for one in change.stretches]
    low, likely, high = (1e3 * seconds for seconds in predict_again(stretches, key(change.after)))
    source = (
        f"measured in this run: {count} steps with these values; the interval allows for the drift of the run"
    )
    return Estimate("step_ms", now, likely, low, high, source)


def _measured(quantity: str, now: float | None, steps: list[float]) -> Estimate:
    """An estimate from measured steps: their mean, and an interval that contains the middle 95 % of their values. With
    fewer than 40 steps, the interval spans from the lowest to the highest value."""
    ordered, out = sorted(steps), len(steps) // 40
    source = f"measured in this run: {len(steps)} steps with these values"
    return Estimate(quantity, now, fmean(steps), ordered[out], ordered[-1 - out], source)
