"""The planner's predictions for a run after changes to its settings: memory, step time, pipeline bubble and
communicated bytes. This module imports the planner, so it is imported only in the worker thread."""

from dataclasses import dataclass, replace

from agents.protocol import Value
from cockpit.knobs.plan.run import Basis, Measured, Reported, Steps
from cockpit.knobs.plan.settings import BY_NAME, MACHINE, Changes, changed
from engine.config.knob_values import with_knobs
from engine.config.layout import Layout
from engine.config.refusal import RefusedError
from engine.planner.advice import SHARED_CORES
from engine.planner.hardware.description import Hardware
from engine.planner.hardware.table import hardware as known_hardware
from engine.planner.measured import Times, imbalance
from engine.planner.memory.plan import MemoryPlan, plan_memory
from engine.planner.refit import Factors, Observed, Span, fit, interval, parts_of
from engine.planner.timing.pipeline import pipeline_time
from engine.planner.timing.predict import predict
from engine.planner.timing.step import Prediction
from engine.planner.workload.communication.traffic import traffic
from engine.planner.workload.job import Job

# Relative error that is assumed for predicted changes until one of this run has been checked.
ASSUMED_ERROR = 0.5


@dataclass(frozen=True)
class Outlook:
    """The planner's predictions for a run after `changes` to its settings. `step_s` is None if times are not known;
    `why` then gives the reason. `bound`: the bubble that the schedule cannot avoid (`bubble_bound`). `bytes`: bytes
    that rank 0 sends in a step, by axis. `source`: a phrase that says where the times come from.
    """

    changes: tuple[tuple[str, Value], ...]
    layout: Layout
    follows: dict[str, tuple[Value, Value]]
    memory: MemoryPlan
    capacity: float | None
    bytes: dict[str, float]
    bound: float | None
    micro_batch: int
    step_s: Span | None = None
    tokens: int = 0
    flops: float = 0.0  # FLOPs of a step relative to those of the run's own layout
    bubble: float | None = None
    mfu: float | None = None
    bound_by: str = ""
    source: str = ""
    why: str = ""

    @property
    def fits(self) -> bool | None:
        return None if self.capacity is None else self.memory.fits(self.capacity)


class Planner:
    """Predicts the memory, traffic and step time that one run would have after changes to its settings."""

    def __init__(self, reported: Reported, basis: Basis, measured: Measured) -> None:
        self.reported, self.basis = reported, basis
        self.hardware = basis.hardware
        self.error = ASSUMED_ERROR if measured.error is None else measured.error
        self._loads = measured.loads
        self._job = self.job(basis.layout)
        self._now = next((one for one in measured.steps if _same(one, reported)), None)
        self._factors = self._fit(measured) if not reported.shared else None
        self._prediction = None if reported.shared else self._predict(self._job, self.hardware)

    def job(self, layout: Layout) -> Job:
        """The job for which the planner makes predictions: that of `layout`. Its imbalance between ep ranks is the
        layout's `plan.imbalance` or the run's measured imbalance, whichever is higher."""
        job = Job.of(layout)
        uneven = imbalance(self._loads, job.grid.ep) if self._loads and job.grid.ep > 1 else 1.0
        return replace(job, imbalance=max(layout.plan.imbalance, 1.0, round(uneven, 1)))

    def machine(self, outlook: Outlook) -> Hardware:
        """The hardware for which `outlook` was predicted."""
        name = dict(outlook.changes).get(MACHINE)
        return known_hardware(str(name)) if name else self.hardware

    def _predict(self, job: Job, hardware: Hardware) -> Prediction:
        if job.precision not in hardware.device.peak:
            legal = ", ".join(hardware.device.peak)
            raise RefusedError(f"{hardware.name} has no known rate in {job.precision}; known: {legal}")
        return predict(job, hardware, self.basis.layout.plan.release)

    def _fit(self, measured: Measured) -> Factors | None:
        observed = []
        for steps in measured.steps:
            times = Times(steps.step_s)
            job = self.job(with_knobs(self.basis.layout, dict(steps.values)))
            parts = parts_of(self._predict(job, self.hardware))
            observed.append(Observed(parts, times.mean, times.error, steps.exchange_s))
        return fit(observed)

    def outlook(self, changes: Changes) -> Outlook:
        """The memory and time that the run would need after `changes`. Raises RefusedError if `changes` are not
        legal."""
        new = changed(self.basis.layout, changes)
        job, hardware = self.job(new.layout), self.hardware
        if name := changes.get(MACHINE):
            hardware = known_hardware(str(name))
        cpu = self.basis.on_cpu and not changes.get(MACHINE)
        memory = plan_memory(job, None if cpu else hardware, gloo=cpu)
        capacity = None if cpu and self.reported.capacity is None else hardware.device.memory_bytes
        sent = {axis: size for axis, size in traffic(job).items() if axis != "control"}
        found = Outlook(
            tuple(changes.items()),
            new.layout,
            dict(new.follows),
            memory,
            capacity,
            sent,
            bubble_bound(job),
            job.micro_batch,
            tokens=job.tokens,
        )
        if self.reported.shared:
            return replace(found, why=SHARED_CORES.partition(",")[0])
        after = self._predict(job, hardware)
        span, source = self._step(changes, after)
        likely = span.likely
        return replace(
            found,
            step_s=span,
            bubble=after.bubble if job.grid.pp > 1 else None,
            mfu=after.mfu * after.step_s[1] / likely if likely else None,
            bound_by=after.bound_by[0],
            source=source,
        )

    def _step(self, changes: Changes, after: Prediction) -> tuple[Span, str]:
        """The predicted step time with its interval, and a phrase that says how both were determined."""
        low, likely, high = after.step_s
        if self._factors is None or self._now is None or changes.get(MACHINE):
            return Span(low, likely, high), "the planner alone; interval of published runs"
        factors, now = self._factors, Times(self._now.step_s)
        assert self._prediction
        before_s, after_s = factors.seconds(parts_of(self._prediction)), factors.seconds(parts_of(after))
        source = (
            f"the planner, fitted to {factors.settings} setting{'s' * (factors.settings > 1)} of this run"
        )
        if all(BY_NAME[name].knob for name in changes):
            span = interval(now.mean, after_s - before_s, now.noise, factors.residual, self.error)
            return Span(max(0.0, span.low), max(0.0, span.likely), span.high), source
        # The fit does not cover a change of a layout key, so the interval is that of published runs.
        middle = max(now.mean + after_s - before_s, 0.0)
        return Span(
            middle * low / likely, middle, middle * high / likely
        ), f"{source}; interval of published runs"


def _same(steps: Steps, reported: Reported) -> bool:
    """Whether the measured `steps` ran with the knob values that are in force now. Only knobs whose values are part of
    a step's summary can be compared."""
    values = dict(reported.values)
    return all(values.get(name, value) == value for name, value in steps.values)


def bubble_bound(job: Job) -> float | None:
    """The pipeline bubble of the job's schedule, as a fraction of the time from a step's first forward to its last
    backward, if all stages take the same time and a backward pass takes twice as long as a forward pass. None without a
    pipeline."""
    if job.grid.pp == 1:
        return None
    stages, m = job.stages, job.micro_batches
    window = pipeline_time(job.schedule, job.grid.pp, job.virtual_stages, m, [1.0] * stages, [2.0] * stages)
    return 1 - m * job.virtual_stages * 3.0 / window
