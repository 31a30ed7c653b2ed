"""Predicts the memory that a job needs, by component and pipeline rank, and checks whether it fits. Sizes are bytes."""

from dataclasses import dataclass
from functools import cached_property

from engine.planner.hardware.description import Hardware
from engine.planner.memory.in_flight import Counts
from engine.planner.memory.peak import LayerBytes, RankMemory, peak_of_rank
from engine.planner.memory.sizes import FP32
from engine.planner.memory.state import saved_state, state_of
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import rank_parameters

RESERVED = 0.025
"""Share of a device's memory that contexts, communication buffers and workspaces take. Assumed: 2 GiB of 80."""

GIB = 2**30
SMALL = GIB / 10  # below this size, a sentence names MiB


@dataclass(frozen=True)
class MemoryPlan:
    """The predicted memory of a job. `in_flight[r]`: the number of micro-batches in flight on each stage of pipeline
    rank r when its memory peaks. `host_copy`: host memory from which a rank's checkpoints are written; it is pinned if
    the rank has a GPU."""

    ranks: tuple[RankMemory, ...]
    in_flight: tuple[Counts, ...]
    host_copy: float = 0.0

    @cached_property
    def worst_rank(self) -> int:
        """The pipeline rank with the highest peak."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    @property
    def peak(self) -> float:
        """Peak memory, in bytes, of the rank that needs the most memory."""
        return self.ranks[self.worst_rank].total

    def fits(self, capacity: float) -> bool:
        """Whether every rank fits into `capacity` bytes."""
        return self.peak <= capacity

    def sentence(self, capacity: float) -> str:
        """A sentence that says whether the job fits, such as "does not fit: 83 GiB of 80, pipeline rank 0, activations
        41"."""
        worst = self.ranks[self.worst_rank]
        name = worst.largest
        begins = "fits" if self.fits(capacity) else "does not fit"
        total, largest = worst.total, worst.components()[name]
        if total < SMALL:
            sizes = f"{total / 2**20:.1f} MiB of {_gib(capacity)} GiB"
            return f"{begins}: {sizes}, pipeline rank {self.worst_rank}, {name} {largest / 2**20:.1f} MiB"
        sizes = f"{_gib(total)} GiB of {_gib(capacity)}"
        return f"{begins}: {sizes}, pipeline rank {self.worst_rank}, {name} {_gib(largest)}"


def plan_memory(job: Job, hardware: Hardware | None = None, gloo: bool = False) -> MemoryPlan:
    """Predict the memory that a job needs. If `hardware` is a machine with GPUs, the prediction includes the memory
    that libraries reserve on a GPU. With `gloo`, or if the hardware was measured with gloo, the prediction includes the
    buffers that the engine's collectives keep on CPUs."""
    gloo = gloo or (hardware is not None and hardware.on_cpu)
    framework = RESERVED * hardware.device.memory_bytes if hardware and not hardware.on_cpu else 0.0
    layers = LayerBytes(job)
    peaks = [peak_of_rank(layers, pp, framework, gloo) for pp in range(job.grid.pp)]
    saves = job.saves and job.framework == "engine"
    host_copy = max(saved_state(job, pp) for pp in range(job.grid.pp)) if saves else 0.0
    return MemoryPlan(tuple(memory for memory, _ in peaks), tuple(counts for _, counts in peaks), host_copy)


def least_bytes(job: Job) -> float:
    """A lower bound on the memory of a run of the engine, summed over all ranks, in bytes. It includes the weights,
    gradients and optimizer state that exist while the loss of the second micro-batch is computed, but no activations
    or buffers."""
    total = 0.0
    for pp in range(job.grid.pp):
        held = rank_parameters(job, pp)
        state = state_of(job, pp, held)
        # With one micro-batch, each unit is freed and reduced in turn, so a rank never holds all weights and gradients.
        once = job.grid.pp == 1 and job.micro_batches == 1
        gradients = min(state.gradients, held.shard * FP32) if once else state.gradients
        weights = 0.0 if once else state.staying
        total += (state.parameters + weights + gradients + state.optimizer) * job.grid.world / job.grid.pp
    return total


def _gib(size: float) -> str:
    return f"{size / GIB:,.0f}" if size >= 10 * GIB else f"{size / GIB:.2g}"
