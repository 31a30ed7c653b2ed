"""Uses the planner to predict the effect of other knob values on a live run.

The layout with the new knob values is planned like any other layout. Memory and traffic are computed with exact
formulas. The planner can only estimate times, so its times are scaled by factors that are fitted to the steps of this
run (`engine.planner.refit`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from msgspec import structs

from agents.protocol import Estimate
from engine.config.knob_values import with_knobs
from engine.config.layout import Layout
from engine.config.relayout import KEYS, KNOB, layout_text, relaid
from engine.config.sizes import expert_capacity
from engine.control.preview.measured_steps import Steps, Values
from engine.planner.hardware.cpu import CPU_CORE
from engine.planner.hardware.description import Hardware
from engine.planner.measured import Times
from engine.planner.memory.plan import MemoryPlan, plan_memory
from engine.planner.refit import Factors, Observed, Parts, Span, fit, interval, parts_of
from engine.planner.timing.predict import predict
from engine.planner.timing.step import Prediction
from engine.planner.token_drops import (
    ALIKE,
    INDEPENDENT,
    expected_drops,
    matching_overdispersion,
)
from engine.planner.workload.communication.traffic import traffic
from engine.planner.workload.job import Job

T = TypeVar("T")

FEW_RANKS = 64  # up to this number of ranks, the traffic of each rank is counted
MOST_PLANNED = 256  # maximum number of jobs in a cache of plans
NOTHING_DROPPED = "without a limit nothing is dropped"
CLOSED_FORM = "closed form"
REFITTED = "the planner, fitted to {} of this run"
ON_THE_CPU = "no data: a process on the CPU rarely returns memory to the system"


class PlannedEffect:
    """Makes the planner's predictions for one live run. `resident`: whether the run reports the resident memory of its
    processes instead of the memory of tensors."""

    def __init__(self, layout: Layout, hardware: Hardware, resident: bool) -> None:
        self._layout, self._hardware, self._resident = layout, hardware, resident
        self._plans: dict[Job, MemoryPlan] = {}
        self._predictions: dict[Job, Prediction] = {}
        self._traffic: dict[Job, dict[str, float]] = {}

    def job(self, values: Values, imbalance: float = 1.0, kept: float | None = None) -> Job:
        """Describe a step with the knob values `values` as a `Job` for the planner. `kept` is the share of (token,
        expert) pairs that are not dropped; if it is None, only the capacity factor limits the number of pairs."""
        job = Job.of(_with_values(self._layout, values))
        limit = job.capacity_factor if kept is None else kept if kept < 1 else None
        # Rounded, so that small changes of the load between steps do not need a new plan.
        even = max(1.0, round(imbalance, 1))
        return replace(job, imbalance=even, capacity_factor=limit and max(0.01, round(limit, 2)))

    # ------------------------------------------------------------------------------------------- memory

    def memory(self, now: float | None, before: Job, after: Job) -> Estimate:
        """Predict the leader's memory: its measured memory plus the planned difference. There is no prediction if the
        measured memory is the resident memory of a process on the CPU."""
        here, there = (self._plan(job).ranks[0].total for job in (before, after))
        by = there - here
        source = f"{CLOSED_FORM}: {_signed(by)} on pipeline rank 0"
        if now is None:
            return Estimate("memory_bytes", source=f"no data: the run reports no memory; {source}")
        if self._resident:
            return Estimate("memory_bytes", now, source=f"{ON_THE_CPU}; tensors: {source}")
        return Estimate("memory_bytes", now, now + by, source=source)

    def peak(self, before: Job, after: Job) -> Estimate:
        """Predict the peak memory of the rank that needs the most memory, before and after the change. Both values are
        computed in closed form from the layout; neither is measured."""
        plan = self._plan(after)
        capacity = self._hardware.device.memory_bytes
        worst = plan.ranks[plan.worst_rank]
        source = f"{CLOSED_FORM}: pipeline rank {plan.worst_rank}, most of it {worst.largest}"
        if self._hardware.device is not CPU_CORE.device and not plan.fits(capacity):
            source = f"{CLOSED_FORM}: {plan.sentence(capacity)}"
        return Estimate("peak_bytes", self._plan(before).peak, plan.peak, source=source)

    def _plan(self, job: Job) -> MemoryPlan:
        return _cached(self._plans, job, lambda: plan_memory(job, gloo=self._resident))

    # ------------------------------------------------------------------------------------------ traffic

    def traffic(
        self, now: Mapping[str, float], before: Job, after: Job, rows: Estimate | None
    ) -> dict[str, Estimate]:
        """Estimate the bytes that all ranks send. There is one estimate for each axis whose bytes change, except for
        the ep axis, and one for the total. `rows`: the estimated bytes of the all-to-alls that send tokens to the
        experts and back; if it is None, the total is not estimated."""
        old, new = self._sent(before), self._sent(after)
        changes = {axis: new[axis] - old[axis] for axis in old}
        found = {
            f"{axis}_bytes": Estimate(
                f"{axis}_bytes", now[f"{axis}_bytes"], now[f"{axis}_bytes"] + by, source=CLOSED_FORM
            )
            for axis, by in changes.items()
            if by and axis != "ep" and f"{axis}_bytes" in now
        }
        if "comm_bytes" in now and rows and rows.after is not None and rows.now is not None:
            base = now["comm_bytes"] + sum(changes.values()) - rows.now
            low, high = (base + end for end in rows.interval) if rows.interval else (None, None)
            by_axis = ", ".join(f"{axis} {by / 1e6:+,.2f} MB" for axis, by in changes.items() if by)
            source = f"{CLOSED_FORM}{by_axis and ': '}{by_axis}"
            found["comm_bytes"] = Estimate(
                "comm_bytes", now["comm_bytes"], base + rows.after, low, high, source
            )
        return found

    def _sent(self, job: Job) -> dict[str, float]:
        """Bytes that all ranks send, by axis. Control messages are not included, nor are the activations of tokens that
        the all-to-alls send."""
        return _cached(self._traffic, job, lambda: _sum_over_ranks(job))

    # --------------------------------------------------------------------------------------------- time

    def prediction(self, job: Job) -> Prediction:
        """The planner's prediction for a step of `job`, without the factors that are fitted to the run."""
        return _cached(self._predictions, job, lambda: predict(job, self._hardware))

    def parts(self, job: Job) -> Parts:
        return parts_of(self.prediction(job))

    def fitted(self, runs: Sequence[tuple[Job, Steps]]) -> Factors | None:
        """The factors by which the planner's times are scaled to match the measured steps in `runs`; None if no step
        was measured."""
        observed = []
        for job, steps in runs:
            times, means = steps.times_s, steps.means()
            parts, exchange, outside = self.parts(job), means.get("exchange_s"), means.get("outside_s")
            observed.append(Observed(parts, times.mean, times.error, exchange, outside))
        return fit(observed)

    def step(self, now: Times, before: Job, after: Job, factors: Factors, error_of_change: float) -> Span:
        """The predicted interval of the step time after a change, in seconds."""
        by = factors.seconds(self.parts(after)) - factors.seconds(self.parts(before))
        return interval(now.mean, by, now.noise, factors.residual, error_of_change)

    # -------------------------------------------------------------------------------------------- drops

    def dropped(
        self, now: float | None, before: Values, after: Values, loads: Sequence[Sequence[int]]
    ) -> Estimate | None:
        """Number of (token, expert) pairs that a step drops at the new capacity; None if no expert load was measured or
        if the router is not `token_choice`."""
        moe, model = self._layout.model.moe, self._layout.model
        if moe is None or moe.router != "token_choice":
            return None
        if after["capacity_factor"] is None:
            return Estimate("dropped", now, 0.0, 0.0, 0.0, NOTHING_DROPPED)
        if not loads:
            return None
        sequences = float(self._layout.train.global_batch)

        def most(values: Values) -> int:
            return expert_capacity(
                float(str(values["capacity_factor"])), model.seq_len, moe.top_k, moe.experts
            )

        def drops(overdispersion: float) -> float:
            return expected_drops(loads, sequences, most(after), overdispersion, model.seq_len)

        if before["capacity_factor"] is not None and now:
            fits = matching_overdispersion(loads, sequences, most(before), now, model.seq_len)
            low, likely, high = drops(fits / 1.5), drops(fits), drops(fits * 1.5)
            source = "expert loads of this run, with the spread that its current drops imply"
        else:
            low, likely, high = drops(INDEPENDENT), drops((INDEPENDENT + ALIKE) / 2), drops(ALIKE)
            source = "expert loads of this run; their spread over sequences is not measured"
        return Estimate("dropped", now, likely, low, high, source)


def _sum_over_ranks(job: Job) -> dict[str, float]:
    """For each axis, the bytes that all ranks together send. In a large job, the bytes are computed for only one rank
    per pp coordinate, and multiplied by the number of ranks with this coordinate. This approximation
    is close, because the sizes of the ranks' shards differ by at most one row."""
    grid = job.grid
    each = 1 if grid.world <= FEW_RANKS else grid.world // grid.pp
    total: Counter[str] = Counter()
    for rank in range(0, grid.world, each):
        total.update({axis: each * sent for axis, sent in traffic(job, rank, rows=0.0).items()})
    return {axis: sent for axis, sent in total.items() if axis != "control"}


def _cached(known: dict[Job, T], job: Job, make: Callable[[], T]) -> T:
    found = known.get(job)
    if found is None:
        if len(known) >= MOST_PLANNED:
            known.clear()
        found = known[job] = make()
    return found


def _signed(size: float) -> str:
    return f"{size / 2**20:+,.1f} MiB"


def _with_values(layout: Layout, values: Values) -> Layout:
    """A copy of `layout` with the knob values `values`. If `values` includes the text of a new layout, the keys that
    this text changes take precedence over the other knobs.
    """
    held = with_knobs(layout, values)
    text = str(values.get(KNOB, layout_text(layout)))
    if text == layout_text(layout):
        return held
    new = relaid(layout, text)
    return structs.replace(held, **{section: _moved(section, held, layout, new) for section in KEYS})


def _moved(section: str, held: Layout, old: Layout, new: Layout) -> object:
    """A copy of a section, such as `grid`, of the layout `held`. If a key of the section has different values in the
    layouts `old` and `new`, the copy has the value in `new`."""
    was, then = getattr(old, section), getattr(new, section)
    changed = {key: getattr(then, key) for key in KEYS[section] if getattr(was, key) != getattr(then, key)}
    return structs.replace(getattr(held, section), **changed)
