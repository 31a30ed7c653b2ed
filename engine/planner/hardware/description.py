"""Description of a machine for the planner: the device, the links between ranks, and the efficiency, that is, which
fraction of each peak rate a run reaches."""

from typing import Annotated

from msgspec import Meta, Struct

# The bounds are far from all machines, and so near that no time, ratio or power of one overflows.
Size = Annotated[float, Meta(ge=1, le=1e18)]  # bytes, bytes/s or FLOP/s
AtLeast0 = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=1e-6, le=1)]
Ratio = Annotated[float, Meta(ge=1e-6, le=1e6)]
Count = Annotated[int, Meta(ge=1, le=2**53)]
AtLeast2 = Annotated[int, Meta(ge=2, le=2**53)]


class Device(Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator, or one rank's share of a machine's CPU cores and memory. `peak`: dense FLOP/s by the precision
    of a matmul."""

    memory_bytes: Size
    memory_bandwidth: Size  # bytes/s
    peak: dict[str, Size]
    source: str


class Link(Struct, frozen=True, forbid_unknown_fields=True):
    """The links at one level of the network, for example inside a node or between nodes. `ranks`: maximum number of
    ranks that these links connect; None: any number."""

    name: str
    ranks: AtLeast2 | None
    latency: AtLeast0  # seconds per message
    bandwidth: Size  # bytes/s that a rank can send while it receives at the same rate
    source: str


class Efficiency(Struct, frozen=True, forbid_unknown_fields=True):
    """The fraction of each peak rate that a run reaches, fitted to a hardware generation or measured by `engine
    probe`."""

    gemm: Share = 0.8  # share of the dense peak that a large matmul reaches
    half_rows: AtLeast0 = 128.0  # number of rows at which a matmul reaches half of `gemm`
    attention: Share = 0.5  # share of the dense peak that fused attention reaches
    memory: Share = 0.8  # share of the memory bandwidth that pointwise operations reach
    link: Share = 0.8  # share of the link bandwidth that large collectives reach
    operation: AtLeast0 = 5e-6  # minimum seconds of an operation
    # By kind of model: interval of the ratio of measured to predicted time.
    spread: dict[str, tuple[Ratio, Ratio]] = {}
    group: AtLeast0 = 0.0  # seconds that each group adds to the time of a grouped matmul


class MeasuredCollective(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fitted time of a collective with one algorithm, over groups of `ranks` ranks with stride `stride`. All groups
    of the axis run at the same time. n bytes take `latency` + n `per_byte` seconds. n is the size of the whole buffer,
    after a gather or before a reduction; for a send, it is the size of the message."""

    axis: str
    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send, ring
    algorithm: str
    ranks: AtLeast2
    stride: Count = 1
    latency: AtLeast0  # seconds
    per_byte: AtLeast0  # seconds
    # Largest buffer for which the engine uses the algorithm; None: no limit.
    most_bytes: Count | None = None
    error: AtLeast0 = 0.0  # median relative deviation of the measured times from the fitted line
    # For the hierarchical algorithm: number of ranks of a node.
    node: Count | None = None


class Measurement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of `engine probe`, and the conditions under which they were made. All ranks measure at the same
    time, so with more ranks than `cores` each measured time includes waiting for a core."""

    ranks: Count  # number of ranks of the probe
    # Cores that the ranks of a machine share; None: each rank has its own GPU.
    cores: Count | None = None
    local_ranks: Count = 1  # number of ranks on a machine
    backend: str = "gloo"
    precision: str = "fp32"
    oversubscribed: bool = False  # whether a machine has more ranks than cores
    operation_cpu: AtLeast0 = 0.0  # CPU seconds that the host takes to dispatch an operation
    pointwise: Annotated[float, Meta(ge=0, le=1e18)] = 0.0  # bytes/s, at least 1; 0: the memory bandwidth
    collectives: tuple[MeasuredCollective, ...] = ()
    algorithms: tuple[MeasuredCollective, ...] = ()  # of `engine collectives`: one row for each algorithm


class Hardware(Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster of identical devices. `links` are ordered from the innermost level to the outermost; the outermost
    level connects any number of ranks."""

    name: str
    device: Device
    links: tuple[Link, ...]
    efficiency: Efficiency = Efficiency()
    measured: Measurement | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether the hardware was measured with gloo, which ranks on CPUs use to communicate."""
        return self.measured is not None and self.measured.backend == "gloo"

    def link(self, ranks: int) -> Link:
        """The innermost level of links that connects `ranks` consecutive ranks."""
        return next(link for link in self.links if link.ranks is None or link.ranks >= ranks)
