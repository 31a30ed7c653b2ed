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


class Hardware(Struct, frozen=True):
    """A cluster of equal devices. `links` are ordered from the innermost level; the last joins any number of ranks."""

    name: str
    device: Device
    links: tuple[Link, ...]
    efficiency: Efficiency = Efficiency()

    def link(self, ranks: int) -> Link:
        """The innermost link that joins `ranks` consecutive ranks."""
        return next(link for link in self.links if link.ranks is None or link.ranks >= ranks)
