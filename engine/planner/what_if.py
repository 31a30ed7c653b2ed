"""The planner's entry point: predicts the memory of a layout and, with a hardware description, its step time.

To predict the effect of a change, change the job (`dataclasses.replace`) or the layout and call `what_if` again.
Calling `what_if` takes a few milliseconds.
"""

from dataclasses import dataclass
from typing import Any

from engine.config.layout import Layout
from engine.config.refusal import RefusedError
from engine.planner.hardware.cpu import cpu_cores
from engine.planner.hardware.description import Hardware
from engine.planner.hardware.table import by_device
from engine.planner.hardware.table import hardware as known_hardware
from engine.planner.hardware.table import load as load_hardware
from engine.planner.memory.plan import MemoryPlan, plan_memory
from engine.planner.timing.measured import with_chosen
from engine.planner.timing.predict import predict
from engine.planner.timing.release import release as known_release
from engine.planner.timing.release import releases
from engine.planner.timing.step import Prediction
from engine.planner.workload.communication.traffic import traffic
from engine.planner.workload.job import Job, planned_precision
from engine.planner.workload.parameters import active, total

UNKNOWN_TIME = "unknown without a machine: give --hardware NAME or FILE, or [hardware]"


@dataclass(frozen=True)
class WhatIf:
    """The predicted memory, traffic and step time of a job. `bytes`: by axis, the number of bytes that rank 0 sends in
    a step. `time` is None if no hardware is given."""

    job: Job
    memory: MemoryPlan
    bytes: dict[str, float]
    hardware: Hardware | None = None
    time: Prediction | None = None

    @property
    def capacity(self) -> float | None:
        """Memory of a device in bytes; None if no hardware is given."""
        return self.hardware.device.memory_bytes if self.hardware else None

    @property
    def fits(self) -> bool | None:
        """Whether every rank fits into its device's memory; None without hardware."""
        return None if self.capacity is None else self.memory.fits(self.capacity)

    def as_json(self) -> dict[str, Any]:
        """The predicted numbers as JSON values, under the names that docs/plan/planner.md lists. Unknown values are
        None."""
        job, time = self.job, self.time
        grid = {
            axis: getattr(job.grid, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        }
        low, mid, high = time.step_s if time else (None, None, None)
        return {
            "hardware": self.hardware.name if self.hardware else None,
            "ranks": job.grid.world,
            "parameters": total(job.model),
            "active_parameters": active(job.model),
            "grid": grid,
            "schedule": job.schedule,
            "virtual_stages": job.virtual_stages,
            "micro_batches": job.micro_batches,
            "micro_batch": job.micro_batch,
            "global_batch": job.global_batch,
            "seq_len": job.seq_len,
            "precision": job.precision,
            "recompute": job.recompute,
            "zero": job.zero,
            "step_s": mid,
            "step_low_s": low,
            "step_high_s": high,
            "tokens_per_s": time.tokens_per_s if time else None,
            "tflops_per_device": time.tflops_per_device if time else None,
            "mfu": time.mfu if time else None,
            "bubble": time.bubble if time else None,
            "phases_s": time.phases if time else None,
            "bound_by": time.bound_by[0] if time else None,
            "bytes": self.bytes,
            "memory": {
                "fits": self.fits,
                "capacity_bytes": self.capacity,
                "peak_bytes": self.memory.peak,
                "worst_rank": self.memory.worst_rank,
                "host_copy_bytes": self.memory.host_copy,
                "ranks": [rank.components() | {"total": rank.total} for rank in self.memory.ranks],
            },
        }


def what_if(job: Job | Layout, hardware: Hardware | None = None, release: str | None = None) -> WhatIf:
    """Predict the memory, traffic and step time of a job or a layout. If `hardware` or `release` is None, the one
    specified in the layout is used. Raises RefusedError."""
    if isinstance(job, Layout):
        hardware, release = as_run(job, hardware or assumed_hardware(job)), release or job.plan.release
        job = Job.of(job)
    if release is not None and release not in releases():
        raise RefusedError(f"plan.release = {release} is not known; legal: none, {', '.join(releases())}")
    if hardware and job.precision not in hardware.device.peak:
        raise RefusedError(
            f"train.precision = {job.precision} has no peak rate on {hardware.name}; legal on this machine: "
            f"{', '.join(hardware.device.peak)}"
        )
    time = predict(job, hardware, release) if hardware else None
    sent = traffic(job, gradient_bytes=known_release(release).gradient_bytes)
    return WhatIf(job, plan_memory(job, hardware), sent, hardware, time)


def assumed_hardware(layout: Layout) -> Hardware | None:
    """The hardware description that the layout's [hardware] section names, or None."""
    if layout.hardware.path:
        return load_hardware(layout.hardware.path)
    return known_hardware(layout.hardware.name) if layout.hardware.name else None


def as_run(layout: Layout, hardware: Hardware | None) -> Hardware | None:
    """The hardware description for a run; if the layout sets `run.collectives`, an all-reduce takes the time of the
    fastest measured algorithm."""
    return with_chosen(hardware) if hardware and layout.run.collectives else hardware


def machine_of_run(layout: Layout, device: str, cores: int = 1) -> Hardware:
    """The hardware description for a run: the machine that the layout's [hardware] section names, else the known
    machine with this device. If neither exists, or if the device has no peak rate at the layout's precision, returns
    the description of a CPU with `cores` cores that the ranks share. The speeds are initial values, which are later
    corrected from the measured steps of the run. The memory size of the CPU is only an assumption."""
    found = as_run(layout, assumed_hardware(layout))
    if found is None:
        found = by_device(device)
    precision = planned_precision(layout.train.precision)
    return found if found and precision in found.device.peak else cpu_cores(cores)
