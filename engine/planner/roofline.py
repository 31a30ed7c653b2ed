"""The communication roofline of a job: on each level of links, the bound of a step: computation, bandwidth or latency.

It is the classic roofline (Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785) with network bytes in
place of memory bytes. CCR (computation to communication ratio) is the FLOPs of a rank in a step over the bytes that it
sends over the level. The ridge is FLOP/s over bytes/s: below the ridge the level's bandwidth bounds the step, above it
the device. A level with many small messages is bound by latency instead (Hockney 1994: alpha + n beta; the two parts
are equal at n = alpha / beta).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.planner.hardware.description import Hardware, Link
from engine.planner.timing.collectives import domains, share_inside
from engine.planner.workload.end_work import embedding_work, head_work
from engine.planner.workload.flops import step_flops
from engine.planner.workload.job import Job
from engine.planner.workload.layer_work import layer_work
from engine.planner.workload.operations import Collective
from engine.planner.workload.traffic import traffic

Regime = Literal["compute", "network", "latency"]
FAR = 0.2  # CCR over the ridge below which the network is a severe bound
NEAR = (0.8, 1.2)  # CCR over the ridge that counts as near the ridge
# The key is the regime, and whether the CCR is far below the ridge (network) or near it (other regimes).
ADVICE: dict[tuple[Regime, bool], str] = {
    ("compute", False): "kernels and precision decide; links could be slower",
    ("compute", True): "balanced; a larger micro-batch leaves room for slower links",
    ("network", False): "larger batch for dp; overlap; smaller tp or ep across this level",
    ("network", True): "four times the batch or a faster link; move tp and ep inside a node",
    ("latency", False): "fewer and larger messages: larger micro-batches, fewer of them",
    ("latency", True): "fewer and larger messages: larger micro-batches, fewer of them",
}


def crossover(latency: float, bandwidth: float) -> float:
    """Size in bytes of a message whose transfer takes as long as its latency."""
    return latency * bandwidth


def ridge(flops_per_s: float, bytes_per_s: float) -> float:
    """CCR at which the device and the network take equal time; below it the network is the bound."""
    return flops_per_s / bytes_per_s


def ddp_ccr(tokens: float, width: float = 2, active_share: float = 1.0) -> float:
    """CCR of data parallelism for a rank that processes `tokens` tokens in a step.

    A model with N parameters takes 6 N FLOPs per token. Among many ranks, a rank sends 2 N width bytes in a ring
    all-reduce, so N cancels. A mixture of experts uses `active_share` of its parameters for a token, but sends all
    gradients.
    """
    return 6 * tokens * active_share / (2 * width)


def roof(ccr: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Attainable FLOP/s at a given CCR."""
    return min(flops_per_s, ccr * bytes_per_s)


@dataclass(frozen=True)
class Level:
    """The load of a job on one level of links. `bytes` and `messages`: what a rank sends in a step, by axis."""

    link: Link
    flops: float  # that a rank computes in a step
    flops_per_s: float  # that large products attain
    bytes_per_s: float  # that large collectives attain
    bytes: dict[str, float]
    messages: dict[str, float]

    @property
    def sent(self) -> float:
        return sum(self.bytes.values())

    @property
    def ccr(self) -> float:
        return self.flops / self.sent if self.sent else float("inf")

    @property
    def ridge(self) -> float:
        return ridge(self.flops_per_s, self.bytes_per_s)

    @property
    def seconds(self) -> dict[Regime, float]:
        """Seconds of a step if only computation, only bandwidth, or only the latency of messages took time."""
        return {
            "compute": self.flops / self.flops_per_s,
            "network": self.sent / self.bytes_per_s,
            "latency": sum(self.messages.values()) * self.link.latency,
        }

    @property
    def regime(self) -> Regime:
        """What bounds the step: the regime with the largest time in `seconds`."""
        return max(self.seconds, key=lambda regime: self.seconds[regime])

    @property
    def efficiency(self) -> float:
        """Share of the device's attainable FLOP/s that the level allows, if everything overlaps."""
        return self.seconds["compute"] / max(self.seconds.values())

    @property
    def advice(self) -> str:
        ratio = self.ccr / self.ridge
        extreme = ratio < FAR if self.regime == "network" else NEAR[0] <= ratio <= NEAR[1]
        return ADVICE[self.regime, extreme]


def roofline(job: Job, hardware: Hardware) -> tuple[Level, ...]:
    """The innermost and the outermost level of links that the job's axes cross, for the rank that sends most."""
    efficiency, device = hardware.efficiency, hardware.device
    wide = "bf16" if job.precision in ("fp8", "nvfp4") else job.precision
    ends = [job.grid.rank(pp=pp) for pp in {0, job.grid.pp - 1}]
    sent = max((traffic(job, rank) for rank in ends), key=lambda axes: sum(axes.values()))
    counts = collectives(job)
    links = (hardware.links[0], hardware.links[-1]) if len(hardware.links) > 1 else (hardware.links[0],)
    by_level: list[tuple[dict[str, float], dict[str, float]]] = [({}, {}) for _ in links]
    for axis, (ranks, stride) in _axes(job).items():
        shares = list(_shares(axis, ranks, stride, hardware))[: len(links)]
        for (sizes, steps_of), (share, steps) in zip(by_level, shares, strict=True):
            if share and sent[axis]:
                sizes[axis] = sent[axis] * share
                steps_of[axis] = counts[axis] * steps
    return tuple(
        Level(
            link,
            step_flops(job) / job.grid.world,
            device.peak[wide] * efficiency.gemm,
            link.bandwidth * efficiency.link,
            sizes,
            messages,
        )
        for link, (sizes, messages) in zip(links, by_level, strict=True)
    )


def _axes(job: Job) -> dict[str, tuple[int, int]]:
    """Axis -> number of ranks in a group, and the stride between them."""
    grid = job.grid
    return {
        "tp": (grid.tp, 1),
        "cp": (grid.cp, grid.tp),
        "ep": (grid.ep, 1),
        "dp": (grid.fsdp * grid.dp_replicate, grid.tp),
        "pp": (min(2, grid.pp), grid.world // grid.pp),
    }


def _shares(axis: str, ranks: int, stride: int, hardware: Hardware) -> Iterator[tuple[float, float]]:
    """For the inner and then the outer level: the share of a rank's bytes on the axis that cross the level, and the
    number of messages of one collective.

    A collective of n bytes over N domains of r ranks sends n (r-1)/r bytes inside a domain and n/r (N-1)/N bytes
    between domains (the hierarchical algorithm of `engine.planner.timing.collectives`); an all-to-all sends each byte
    once.
    """
    together, spanned = domains(ranks, stride, hardware)
    if ranks == 1:
        yield from ((0.0, 0.0), (0.0, 0.0))
    elif spanned == 1:
        yield from ((1.0, ranks - 1.0), (0.0, 0.0))
    elif together == 1:
        yield from ((0.0, 0.0), (1.0, ranks - 1.0))
    else:
        inside = share_inside(axis, together, ranks)
        yield from ((inside, together - 1.0), (1 - inside, spanned - 1.0))


def collectives(job: Job) -> Counter[str]:
    """Number of collectives that the first pipeline rank starts in a step, by axis."""
    found: Counter[str] = Counter()
    stages = job.stages_of(0)
    layers = Counter(job.model.layers[n] for stage in stages for n in job.parts[stage])
    works = [(layer_work(job, layer), times) for layer, times in layers.items()]
    works += [(embedding_work(job), 1)]
    if job.stages - 1 in stages:
        works.append((head_work(job), 1))
    for work, times in works:
        again = {"none": (), "selective": work.core, "full": work.forward}[job.recompute]
        for operation in (*work.forward, *work.backward, *again):
            if isinstance(operation, Collective):
                found["ep" if operation.axis == "etp" else operation.axis] += times * job.micro_batches
    if job.grid.pp > 1:
        found["pp"] = 2 * len(stages) * job.micro_batches
    units = sum(layers.values()) + 2
    found["dp"] = units * (2 * job.micro_batches + 1 if job.zero == 3 else 2)
    return found
