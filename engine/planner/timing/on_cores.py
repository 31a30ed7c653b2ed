"""Time of a step on CPU cores that `engine probe` measured.

Step times on CPU cores are predicted differently from those on GPUs in three ways. The cores that dispatch operations
also run the kernels, so the time to dispatch an operation adds to the time of its kernel. On CPU cores, pointwise
work is limited by arithmetic on cached data and not by memory bandwidth. `engine probe` therefore derives the rate of
pointwise work from the measured time of a small model, minus the predicted time of matmuls, attention and dispatches.
Ranks share cores: while one rank waits, another computes. So on an oversubscribed machine the time of a step is the CPU
time of all ranks divided by the number of cores, and a pipeline's bubble costs no time while there are more ranks than
cores.
"""

from collections.abc import Iterable

from engine.planner.hardware.description import Hardware, Measurement
from engine.planner.timing.collectives import collective_time
from engine.planner.timing.kernels import Kernels
from engine.planner.timing.measured import share_of_cores
from engine.planner.timing.pipeline import pipeline_time, rank_times
from engine.planner.timing.release import Release
from engine.planner.timing.stage import Seconds
from engine.planner.timing.step import Pass, Prediction, Step
from engine.planner.workload.communication.exchanges import Part, repeats, replica_sums
from engine.planner.workload.communication.fsdp_units import fsdp_units
from engine.planner.workload.job import Job
from engine.planner.workload.operations import Gemm, Memory, Work
from engine.planner.workload.parameters import Held
from engine.planner.workload.transformer import Experts, Layer

# Number of operations that torch dispatches: (forward, backward) of each part of the model, and the recomputed
# operations of each recompute mode. A test counts them on the engine's layers
# (tests/unit/engine/timing/test_on_cores.py).
DENSE, EXPERTS, SHARED = (71, 118), (151, 173), (9, 27)
# Recompute mode -> operations in (a layer with a dense MLP, a layer with experts).
AGAIN = {
    "none": (0, 0),
    "selective": (69, 69),
    "full": (110, 156),
}
EMBEDDING, HEAD = (4, 6), (63, 41)
OPTIMIZER = 10  # host operations per weight: gradient norm, clipping, update
# Host time of an FSDP unit, as a number of dispatched operations: for its hooks in each micro-batch, for each gather
# and for each reduction. They are measured as CPU time of the main thread, from runs with one and four micro-batches
# at ZeRO 1, 2 and 3 (docs/measurements.md).
HOOKS, GATHER, REDUCTION = 150, 200, 150


def predict_on_cores(job: Job, hardware: Hardware, release: Release) -> Prediction:
    """Predict the time of a step on CPU cores that ranks share. `engine.planner.timing.predict.predict` calls this for
    CPUs that `engine probe` measured."""
    assert hardware.measured
    return CoresStep(job, hardware, release, hardware.measured).prediction()


class CoreKernels(Kernels):
    """Predicts the time of operations on a CPU core. Pointwise work runs at its measured rate."""

    def __init__(self, hardware: Hardware, precision: str, pointwise: float):
        super().__init__(hardware, precision)
        self.pointwise, self.group = pointwise, hardware.efficiency.group

    def gemm(self, op: Gemm) -> float:
        return super().gemm(op) + (op.count * self.group if op.count > 1 else 0.0)

    def memory(self, op: Memory) -> float:
        return op.bytes / self.pointwise


class CoresStep(Step):
    """Predicts the time of a step on CPU cores that ranks share, as the sum of its phases (see `Step`)."""

    def __init__(self, job: Job, hardware: Hardware, release: Release, measured: Measurement):
        super().__init__(job, hardware, release)
        self.measured = measured
        self.clock.kernels = CoreKernels(
            hardware, job.precision, measured.pointwise or hardware.device.memory_bandwidth
        )
        # The probe measured all times while its other ranks ran on the same cores.
        self.share = share_of_cores(job.grid.world, hardware)
        self.scale = self.share / share_of_cores(measured.ranks, hardware)

    def _timed(self, part: Part, work: Work) -> Pass:
        one = super()._timed(part, work)
        self._dispatches(one, part)
        return one

    def _dispatches(self, one: Pass, layer: Part) -> None:
        """Set the launch count of a pass to the number of operations that torch dispatches, instead of the number of
        GPU kernels."""
        forward, backward, again = (EMBEDDING if layer == "embedding" else HEAD) + (0,)
        if isinstance(layer, Layer):
            experts = isinstance(layer.mlp, Experts)
            forward, backward = EXPERTS if experts else DENSE
            again = AGAIN[self.job.recompute][experts]
            if isinstance(layer.mlp, Experts) and layer.mlp.shared_hidden:
                forward, backward = forward + SHARED[0], backward + SHARED[1]
        one.forward.launches, one.backward.launches, one.again.launches = forward, backward, again

    def _seconds(self, blocks: Iterable[tuple[Seconds, ...]]) -> float:
        """The times of kernels, operator dispatches and collectives, in seconds, added up without overlap."""
        parts = [part for block in blocks for part in block]
        device = sum(part.compute + sum(part.exposed.values()) for part in parts)
        return self.scale * (device + self._host(sum(part.launches for part in parts)))

    def _host(self, operations: float) -> float:
        return operations * self.hardware.efficiency.operation

    def _window(self, forward: list[float], backward: list[float]) -> float:
        """The larger of two times: the pipeline's critical path as if each rank had its own core, and the CPU time of
        all ranks divided by the number of cores."""
        job, grid = self.job, self.job.grid
        alone = pipeline_time(job.schedule, grid.pp, job.virtual_stages, job.micro_batches, forward, backward)
        busy = rank_times(job.schedule, grid.pp, job.virtual_stages, forward, backward)
        if self.share <= 1:
            return alone
        return max(alone / self.share, job.micro_batches * sum(busy) / grid.pp)

    def _sends(self) -> float:
        return self.scale * super()._sends()

    def _data_parallel(self, pp: int, held: Held, forward: float, backward: float) -> float:
        """Seconds that data parallelism takes: weight gathers, gradient reductions, and the host time of FSDP's hooks.
        An FSDP unit cannot run until its weights are gathered, so the gathers are fully exposed. Reductions overlap
        with the backward pass but use the same cores."""
        job, grid = self.job, self.job.grid
        if max(grid.pp, grid.fsdp, grid.dp_replicate, job.efsdp) == 1:
            return 0.0  # not sharded
        gathers, reductions = unit_exchanges(job, pp)
        total = 0.0
        for kind, numbers, size, stride in (
            ("dense", held.dense_shard * grid.fsdp, grid.fsdp, grid.tp),
            ("experts", held.experts_shard * job.efsdp, job.efsdp, grid.ep * job.etp),
        ):
            units, gathered = len(gathers[kind]), sum(gathers[kind])
            if units and size > 1:
                gather = collective_time("all_gather", 4 * numbers / units, size, stride, self.hardware)
                reduce = collective_time("reduce_scatter", 4 * numbers / units, size, stride, self.hardware)
                total += gathered * gather + units * reductions * reduce / 2
            hooks = units * job.micro_batches * HOOKS
            total += self._host(hooks + gathered * GATHER + units * reductions * REDUCTION)
        sums = replica_sums(job, fsdp_units(job, pp), self.release.gradient_bytes)
        total += sum(self._alone(one) for one in sums) + self._compressing()
        return self.scale * total

    def _optimizer(self, held: Held) -> float:
        layers = sum(len(self.job.parts[stage]) for stage in self.job.stages_of(0))
        return self.scale * (super()._optimizer(held) + self._host(OPTIMIZER * (9 * layers + 3)))


def unit_exchanges(job: Job, pp: int) -> tuple[dict[str, list[int]], int]:
    """The number of gathers per step of each FSDP unit of pipeline rank `pp`, separately for dense units and expert
    units, and the number of reductions of a unit per step."""
    often = repeats(job, pp)
    gathers: dict[str, list[int]] = {"dense": [], "experts": []}
    for unit in fsdp_units(job, pp):
        gathers["experts" if unit.experts else "dense"].append(often.root if unit.root else often.gathers)
    return gathers, often.reductions
