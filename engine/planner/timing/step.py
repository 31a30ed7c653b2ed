"""Predicted time of a training step, by cause and with an interval."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from engine.planner.hardware.description import Hardware
from engine.planner.timing.collectives import collective_time
from engine.planner.timing.pipeline import pipeline_time, rank_times
from engine.planner.timing.release import Release
from engine.planner.timing.stage import CONTENTION, Clock, Seconds
from engine.planner.workload.communication.compressed_gradients import PASSES
from engine.planner.workload.communication.exchanges import (
    Exchange,
    Part,
    again,
    data_exchanges,
    parts,
    repeats,
    send_bytes,
    sends,
    stays_gathered,
)
from engine.planner.workload.communication.fsdp_units import fsdp_units
from engine.planner.workload.communication.traffic import traffic
from engine.planner.workload.flops import step_flops
from engine.planner.workload.job import Job
from engine.planner.workload.operations import Work
from engine.planner.workload.parameters import Held, rank_parameters

# Bytes of memory traffic per parameter: fp32 weight, moments, gradient and new weights.
OPTIMIZER = {
    "adamw": 30.0,
    "sgd": 22.0,
}
CAUSES = {
    "compute": "Matrix products, attention and pointwise work",
    "recompute": "Recomputed activations",
    "tp": "Exposed exchanges of tensor parallelism",
    "cp": "Exchanges of context parallelism",
    "ep": "Exposed expert all-to-alls",
    "dp": "Exposed gradient reductions and weight gathers",
    "pp": "Sends between pipeline stages",
    "bubble": "The pipeline's idle time",
    "launch": "Launching kernels from the host",
    "optimizer": "The optimizer",
}
SINGULAR = ("bubble", "launch", "optimizer")
WIDE = (0.6, 1.7)  # interval of measured over predicted time, for models without measurements
PAUSE = 0.45  # time from the end of a kernel to the full rate of the next, over the launch time


@dataclass(frozen=True)
class Prediction:
    """A predicted step. `step_s`: low, likely and high estimate of the step time, in seconds. `phases`: seconds by
    cause, which add up to `step_s[1]`. `forward` and `backward`: seconds of a micro-batch by stage, including exposed
    collectives and recomputation. `bubble`: share of the time from the first to the last pipeline action in which a
    rank is idle, averaged over ranks. The entry `bubble` of `phases` is the idle time of the slowest rank."""

    step_s: tuple[float, float, float]
    tokens_per_s: float
    tflops_per_device: float
    mfu: float
    bubble: float
    phases: dict[str, float]
    bytes: dict[str, float]
    bound_by: tuple[str, str]
    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()


@dataclass
class Pass:
    """Times of the forward pass, the backward pass and the recomputation of one micro-batch, for the embedding, the
    layers or the head of a stage."""

    forward: Seconds = field(default_factory=Seconds)
    backward: Seconds = field(default_factory=Seconds)
    again: Seconds = field(default_factory=Seconds)

    def add(self, other: "Pass", times: int) -> None:
        self.forward.add(other.forward, times)
        self.backward.add(other.backward, times)
        self.again.add(other.again, times)


Blocks = tuple[Pass, Pass, Pass]
"""The times of a stage's embedding, of its layers, and of its head."""


class Step:
    """Computes the time of a step as the sum of its phases (computation, bubble, sends between stages, ...)."""

    def __init__(self, job: Job, hardware: Hardware, release: Release):
        self.job, self.hardware, self.release = job, hardware, release
        self.clock = Clock(job, hardware, release)
        self.times: dict[Part, Pass] = {}

    def prediction(self) -> Prediction:
        job, release = self.job, self.release
        grid, v, m = job.grid, job.virtual_stages, job.micro_batches
        passes = [self._stage(stage) for stage in range(job.stages)]
        forward = [self._seconds((part.forward,) for part in blocks) for blocks in passes]
        backward = [
            self._seconds((part.backward, part.again) for part in reversed(blocks)) for blocks in passes
        ]
        window = self._window(forward, backward)
        busy = rank_times(job.schedule, grid.pp, v, forward, backward)
        slowest = max(range(grid.pp), key=busy.__getitem__)
        phases = self._phases(slowest, passes, busy[slowest])
        phases["bubble"] = window - m * busy[slowest]
        phases["pp"] = self._sends()
        mine = job.stages_of(slowest)
        held = rank_parameters(job, slowest)
        phases["dp"] = self._data_parallel(
            slowest, held, sum(forward[s] for s in mine), sum(backward[s] for s in mine)
        )
        phases["optimizer"] = self._optimizer(held)
        phases = {cause: seconds * release.factor for cause, seconds in phases.items()}
        total = sum(phases.values())
        flops = step_flops(job) / total / grid.world
        peak = self.hardware.device.peak["bf16" if job.precision in ("fp8", "nvfp4") else job.precision]
        low, high = self._interval()
        return Prediction(
            step_s=(total * low, total, total * high),
            tokens_per_s=job.tokens / total,
            tflops_per_device=flops / 1e12,
            mfu=flops / peak,
            bubble=1 - m * sum(busy) / len(busy) / window,
            phases=phases,
            bytes=traffic(job, gradient_bytes=release.gradient_bytes),
            bound_by=_bound_by(phases, total),
            forward=tuple(seconds * release.factor for seconds in forward),
            backward=tuple(seconds * release.factor for seconds in backward),
        )

    def _window(self, forward: list[float], backward: list[float]) -> float:
        """Seconds from the first to the last pipeline action of a step, over all micro-batches."""
        job = self.job
        return pipeline_time(
            job.schedule, job.grid.pp, job.virtual_stages, job.micro_batches, forward, backward
        )

    def _interval(self) -> tuple[float, float]:
        """The interval that contains the middle 85 % of the ratios of measured to predicted time in published results.
        If the framework's release is unknown, it is the smallest interval that contains that of known and that of
        unknown releases."""
        kind = "routed" if self.job.model.routed else "dense"
        spread = self.hardware.efficiency.spread
        known, unknown = spread.get(kind), spread.get(f"{kind} unknown", WIDE)
        if known is None:
            return unknown
        return known if self.release.source else (min(known[0], unknown[0]), max(known[1], unknown[1]))

    def _stage(self, stage: int) -> Blocks:
        """The times of one stage's embedding (first stage only), layers, and head (last stage only)."""
        embedding, layers, head = Pass(), Pass(), Pass()
        blocks = {"embedding": embedding, "head": head, "mtp": head}
        for part, work, times in parts(self.job, stage):
            total = blocks[part] if isinstance(part, str) else layers
            total.add(self._part(part, work), times)
        return embedding, layers, head

    def _part(self, part: Part, work: Work) -> Pass:
        if part not in self.times:
            self.times[part] = self._timed(part, work)
        return self.times[part]

    def _timed(self, part: Part, work: Work) -> Pass:
        time = self.clock.time
        return Pass(time(work.forward), time(work.backward), time(again(self.job, part, work)))

    def _seconds(self, blocks: Iterable[tuple[Seconds, ...]]) -> float:
        """Seconds of a forward or a backward pass, whose blocks (embedding, layers, head) run one after another. The
        host launches kernels without waiting for the device, and a kernel starts when the host has launched it and the
        kernel before it has ended. So a block ends at the later of two times (a smooth maximum): the end of the block
        before it plus the device time of this block, and the time at which the host has launched this block. Between
        two kernels, the device also pauses for a fraction (`PAUSE`) of the launch time."""
        launched = end = 0.0
        for block in blocks:
            host = sum(part.launches for part in block) * self.hardware.efficiency.operation
            device = sum(part.compute + sum(part.exposed.values()) for part in block) + PAUSE * host
            launched += host
            first, last = sorted((end + device, launched))
            end = last * (1 + (first / last) ** 8) ** 0.125 if last else 0.0
        return end

    def _phases(self, rank: int, passes: list[Blocks], busy: float) -> dict[str, float]:
        """Time of pipeline rank `rank` in seconds, by cause, over all micro-batches."""
        m = self.job.micro_batches
        phases = dict.fromkeys(("compute", "recompute", "tp", "cp", "ep", "launch"), 0.0)
        for stage in self.job.stages_of(rank):
            for one in passes[stage]:
                phases["compute"] += m * (one.forward.compute + one.backward.compute)
                phases["recompute"] += m * one.again.compute
                for part in (one.forward, one.backward, one.again):
                    for axis, seconds in part.exposed.items():
                        phases[axis] += m * seconds
        phases["launch"] = max(0.0, m * busy - sum(phases.values()))
        return phases

    def _sends(self) -> float:
        """Exposed time of the sends between stages, in seconds. The sends that fill and drain the pipeline are always
        exposed. If the framework release does not overlap sends with computation, all sends of the rank that sends most
        are added. In a pipeline of two ranks, each rank sends once per micro-batch; in a longer pipeline, the middle
        ranks send twice per micro-batch."""
        job, grid = self.job, self.job.grid
        if grid.pp == 1:
            return 0.0
        one = collective_time("send", send_bytes(job), 2, grid.world // grid.pp, self.hardware)
        most = max(sends(job, pp) for pp in range(grid.pp))
        steady = 0 if self.release.overlap_pp else most * job.micro_batches
        return one * (2 * (grid.pp - 1) + steady)

    def _data_parallel(self, pp: int, held: Held, forward: float, backward: float) -> float:
        """Exposed seconds of gradient reductions and weight gathers of pipeline rank `pp`, whose forward and backward
        passes of a micro-batch take `forward` and `backward` seconds.

        At ZeRO 0, gradients are summed by an all-reduce, which costs as much as a reduce-scatter and an all-gather. At
        ZeRO 1 to 3, gradients are reduced to shards while the backward pass runs. At ZeRO 2 and 3, gradients are
        reduced in each micro-batch, unless they are kept unsharded until the end of the step.

        Weights are gathered while the forward pass runs. At ZeRO 3, weights are gathered for each use, in the forward
        pass and in the backward pass.
        """
        job, found = self.job, data_exchanges(self.job, pp, self.release.gradient_bytes)
        reduce, sums, gather, root = (sum(self._alone(one) for one in group) for group in found)
        if not self.release.overlap_dp:
            return sum(one.times * self._alone(one) for group in found for one in group) + self._compressing()
        sums += self._compressing()
        often, m = repeats(job, pp), job.micro_batches
        layers = max(1, sum(len(job.parts[s]) for s in job.stages_of(0)))
        if job.zero == 0:
            return _exposed(reduce + sums + gather, backward, layers)
        # Replicas sum the shards once, while the last backward pass runs. At ZeRO 3 a backward pass gathers weights.
        with_it = gather if job.zero == 3 and not stays_gathered(job) else 0.0
        seconds = _exposed(reduce + sums + with_it, backward, layers)
        seconds += (often.reductions - 1) * _exposed(reduce + with_it, backward, layers)
        if job.zero == 3 and stays_gathered(job):  # a gather overlaps with a forward or backward pass
            return (
                seconds
                + _exposed(root, forward, layers)
                + often.gathers * _exposed(gather, (forward + backward) / 2, layers)
            )
        return seconds + (m if job.zero == 3 else 1) * _exposed(root + gather, forward, layers)

    def _alone(self, one: Exchange) -> float:
        """Seconds of an exchange without overlap."""
        return collective_time(one.kind, one.bytes, one.ranks, one.stride, self.hardware)

    def _compressing(self) -> float:
        """Seconds that a rank takes to compress its gradients for the sum over the replicas."""
        job = self.job
        if job.grid.dp_replicate == 1 or job.compression.method == "none":
            return 0.0
        numbers = sum(prod(shape) for unit in fsdp_units(job, 0) for shape in unit.shapes)
        return numbers * 4 * PASSES[job.compression.method] / self.clock.kernels.bandwidth

    def _optimizer(self, held: Held) -> float:
        job = self.job
        if job.adapters:
            return 0.0
        numbers = held.shard if job.zero else held.whole
        return numbers * OPTIMIZER[job.optimizer] / self.clock.kernels.bandwidth


def _exposed(exchange: float, compute: float, parts: int) -> float:
    """Seconds that an exchange adds to a step although it overlaps with computation: its exposed time, plus the time by
    which it slows down concurrent kernels. The exchange is split into `parts` equal collectives. At least the time of
    one of them is exposed, and at least the time by which the exchange outlasts the computation. During the rest of its
    time, the exchange slows down the kernels that run concurrently."""
    left = max(exchange / parts, exchange - compute)
    return left + CONTENTION * (exchange - left)


def _bound_by(phases: dict[str, float], total: float) -> tuple[str, str]:
    """The cause with the largest share of the step time, and a sentence that states this share."""
    cause = max(phases, key=phases.__getitem__)
    return (
        cause,
        f"{CAUSES[cause]} take{'s' * (cause in SINGULAR)} {100 * (phases[cause] / total):.0f} % of the step.",
    )
