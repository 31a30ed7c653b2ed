"""The communication roofline of a job: whether computation, bandwidth or latency bounds a step on each level of links.

The method is the classic roofline (Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785) with network
bytes in place of memory bytes. CCR (computation to communication ratio) is the FLOPs of a rank in a step divided by the
bytes that it sends over the links of the level. The ridge is the device's FLOP/s divided by the level's bytes/s. If the
CCR is below the ridge, the level's bandwidth bounds the step; above the ridge, the device's FLOP/s bounds it. With many
small messages, latency bounds the step instead: a message of n bytes takes alpha + n beta seconds, and the two terms
are equal at n = alpha / beta (Hockney 1994).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.planner.hardware.description import Hardware, Link
from engine.planner.timing.collectives import sent_by_level
from engine.planner.timing.release import release as known_release
from engine.planner.workload.communication.exchanges import Exchange, rank_exchanges
from engine.planner.workload.flops import step_flops
from engine.planner.workload.job import Job

Regime = Literal["compute", "network", "latency"]
FAR = 0.2  # CCR relative to the ridge, below which the network is a severe bound
NEAR = (0.8, 1.2)  # CCR relative to the ridge, up to which it counts as near the ridge
# The key is the regime, and whether the CCR is far below the ridge (for the network) or near it (for other
# regimes).
ADVICE: dict[tuple[Regime, bool], str] = {
    ("compute", False): "speed depends on kernels and precision; links could be slower",
    ("compute", True): "balanced; a larger micro-batch leaves room for slower links",
    ("network", False): "larger batch for dp; overlap; smaller tp or ep across this level",
    ("network", True): "four times the batch or a faster link; move tp and ep inside a node",
    ("latency", False): "fewer and larger messages: larger micro-batches, fewer of them",
    ("latency", True): "fewer and larger messages: larger micro-batches, fewer of them",
}


def crossover(latency: float, bandwidth: float) -> float:
    """The message size in bytes at which latency and transfer at full bandwidth take equal time."""
    return latency * bandwidth


def ridge(flops_per_s: float, bytes_per_s: float) -> float:
    """CCR at which the device and the network take equal time. Below this CCR the job is network-bound."""
    return flops_per_s / bytes_per_s


def ddp_ccr(tokens: float, width: float = 2, active_share: float = 1.0) -> float:
    """CCR of data parallelism for a rank that processes `tokens` tokens in a step.

    A model with N parameters takes 6 N FLOPs per token. In a ring all-reduce over many ranks, a rank sends 2 N gradient
    elements of `width` bytes each, so N cancels out of the CCR. A mixture-of-experts model uses only `active_share` of
    its parameters for a token, but sends all gradients.
    """
    return 6 * tokens * active_share / (2 * width)


def roof(ccr: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Attainable FLOP/s at a given CCR."""
    return min(flops_per_s, ccr * bytes_per_s)


@dataclass(frozen=True)
class Level:
    """What a job sends over one level of links, such as the links inside a node, and what limits a step on this level.
    `bytes` and `messages`: by axis, the number of bytes and of messages that a rank sends in a step."""

    link: Link
    flops: float  # FLOPs that a rank computes in a step
    flops_per_s: float  # FLOP/s that large matmuls reach
    bytes_per_s: float  # bytes/s that large collectives reach
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
        """The time in seconds that a step would take if it were limited only by computation, only by bandwidth, or only
        by message latency."""
        return {
            "compute": self.flops / self.flops_per_s,
            "network": self.sent / self.bytes_per_s,
            "latency": sum(self.messages.values()) * self.link.latency,
        }

    @property
    def regime(self) -> Regime:
        """What limits the step: the entry of `seconds` with the longest time."""
        return max(self.seconds, key=lambda regime: self.seconds[regime])

    @property
    def efficiency(self) -> float:
        """Share of the device's attainable FLOP/s that the job can reach with these links, if communication fully
        overlaps with computation."""
        return self.seconds["compute"] / max(self.seconds.values())

    @property
    def advice(self) -> str:
        ratio = self.ccr / self.ridge
        extreme = ratio < FAR if self.regime == "network" else NEAR[0] <= ratio <= NEAR[1]
        return ADVICE[self.regime, extreme]


def roofline(
    job: Job, hardware: Hardware, release: str | None = None, pp: int | None = None
) -> tuple[Level, ...]:
    """What a rank at pipeline coordinate `pp` sends in a step over the innermost and over the outermost level of links.
    `pp` None: the first or the last pipeline rank, whichever sends more. The bytes and messages are computed from the
    same collectives as the predicted step time (`engine.planner.workload.communication.exchanges`)."""
    efficiency, device = hardware.efficiency, hardware.device
    wide = "bf16" if job.precision in ("fp8", "nvfp4") else job.precision
    links = (hardware.links[0], hardware.links[-1]) if len(hardware.links) > 1 else (hardware.links[0],)
    gradient_bytes = known_release(release).gradient_bytes
    loads = [
        _loads(rank_exchanges(job, at, gradient_bytes), hardware)
        for at in ({0, job.grid.pp - 1} if pp is None else {pp})
    ]
    most = max(loads, key=lambda load: sum(sum(level.bytes.values()) for level in load))
    return tuple(
        Level(
            link,
            step_flops(job) / job.grid.world,
            device.peak[wide] * efficiency.gemm,
            link.bandwidth * efficiency.link,
            load.bytes,
            load.messages,
        )
        for link, load in zip(links, most, strict=False)
    )


class Load(NamedTuple):
    """By axis, the number of bytes and the number of messages that a rank sends over one level of links in a step."""

    bytes: dict[str, float]
    messages: dict[str, float]


def _loads(exchanges: list[Exchange], hardware: Hardware) -> tuple[Load, Load]:
    """The bytes and messages that a rank sends in `exchanges` over the innermost level of links, and those over the
    outermost level."""
    both = Load({}, {}), Load({}, {})
    for one in exchanges:
        parts = sent_by_level(one.kind, one.bytes, one.copies, one.ranks, one.stride, hardware)
        for load, (size, steps) in zip(both, parts, strict=True):
            if size:
                load.bytes[one.axis] = load.bytes.get(one.axis, 0.0) + one.times * size
                load.messages[one.axis] = load.messages.get(one.axis, 0.0) + one.times * one.pieces * steps
    return both


def collectives(job: Job) -> Counter[str]:
    """Number of collectives that the first pipeline rank starts in a step, by axis."""
    found: Counter[str] = Counter()
    for one in rank_exchanges(job, 0, known_release(None).gradient_bytes):
        found[one.axis] += round(one.times * one.pieces)
    return found
