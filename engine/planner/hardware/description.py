"""What the planner knows of a machine: a device, the links between ranks, and how much of each a run attains."""

from typing import Annotated

from msgspec import Meta, Struct

Above0 = Annotated[float, Meta(gt=0, le=1e18)]
AtLeast0 = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Device(Struct, frozen=True):
    """One accelerator, or the share of a CPU that one rank has. `peak`: dense FLOP/s by the precision of a product."""

    memory_bytes: Above0
    memory_bandwidth: Above0  # bytes/s
    peak: dict[str, Above0]
    source: str


class Link(Struct, frozen=True):
    """One level of links. `ranks`: how many ranks it joins at most (None: any number)."""

    name: str
    ranks: Annotated[int, Meta(ge=2)] | None
    latency: AtLeast0  # seconds per message
    bandwidth: Above0  # bytes/s that a rank can send, while it receives as much
    source: str


class Efficiency(Struct, frozen=True):
    """Attained shares of the peaks: fitted once for a hardware generation, or measured by `engine probe`."""

    gemm: Share = 0.8  # of the dense peak, by a large matrix product
    half_rows: AtLeast0 = 128.0  # rows of a product at which it attains half of `gemm`
    attention: Share = 0.5  # of the dense peak, by fused attention
    memory: Share = 0.8  # of the memory bandwidth, by pointwise operations
    link: Share = 0.8  # of the bandwidth of links, by large collectives
    operation: AtLeast0 = 5e-6  # seconds that an operation takes at least
    spread: dict[
        str, tuple[Above0, Above0]
    ] = {}  # interval of measured over predicted seconds, by kind of model
    group: AtLeast0 = 0.0  # seconds that each group adds to a grouped product


class MeasuredCollective(Struct, frozen=True, kw_only=True):
    """A collective by one algorithm, over groups of `ranks` ranks that are `stride` apart, all groups of the axis at
    once: n bytes take `latency` + n `per_byte` seconds. n is the whole buffer, as gathered or before it is reduced; of
    a send the message."""

    axis: str
    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send, ring
    algorithm: str
    ranks: Annotated[int, Meta(ge=2)]
    stride: Annotated[int, Meta(ge=1)] = 1
    latency: AtLeast0  # seconds
    per_byte: AtLeast0  # seconds
    most_bytes: Annotated[int, Meta(ge=1)] | None = (
        None  # largest buffer for which the engine picks the algorithm
    )
    error: AtLeast0 = 0.0  # median relative deviation of the measured times from the line


class Measurement(Struct, frozen=True, kw_only=True):
    """What `engine probe` measured, and under what conditions. With more ranks than `cores`, all ranks were busy at
    once, so each time contains the wait for a core."""

    ranks: Annotated[int, Meta(ge=1)]  # that ran
    cores: Annotated[int, Meta(ge=1)] | None = (
        None  # that the ranks of a machine share; None: each has its own GPU
    )
    local_ranks: Annotated[int, Meta(ge=1)] = 1  # of a machine
    backend: str = "gloo"
    precision: str = "fp32"
    oversubscribed: bool = False  # more ranks of a machine than cores
    operation_cpu: AtLeast0 = 0.0  # seconds of a core for an operation of the host
    pointwise: Annotated[float, Meta(ge=0, le=1e18)] = 0.0  # bytes/s of pointwise work; 0: the memory's
    collectives: tuple[MeasuredCollective, ...] = ()


class Hardware(Struct, frozen=True):
    """A cluster of equal devices. `links` are ordered from the innermost level; the last joins any number of ranks."""

    name: str
    device: Device
    links: tuple[Link, ...]
    efficiency: Efficiency = Efficiency()
    measured: Measurement | None = None

    def link(self, ranks: int) -> Link:
        """The innermost link that joins `ranks` consecutive ranks."""
        return next(link for link in self.links if link.ranks is None or link.ranks >= ranks)
