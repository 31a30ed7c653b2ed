"""Description of a machine for the planner: the device, the links between ranks, and the efficiency, that is, which
fraction of each peak rate a run reaches."""

from typing import Annotated

from msgspec import Meta, Struct

Above0 = Annotated[float, Meta(gt=0, le=1e18)]
AtLeast0 = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Device(Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator, or one rank's share of a machine's CPU cores and memory. `peak`: dense FLOP/s by the precision
    of a matmul."""

    memory_bytes: Above0
    memory_bandwidth: Above0  # bytes/s
    peak: dict[str, Above0]
    source: str


class Link(Struct, frozen=True, forbid_unknown_fields=True):
    """The links at one level of the network, for example inside a node or between nodes. `ranks`: maximum number of
    ranks that these links connect; None: any number."""

    name: str
    ranks: Annotated[int, Meta(ge=2)] | None
    latency: AtLeast0  # seconds per message
    bandwidth: Above0  # bytes/s that a rank can send while it receives at the same rate
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
    spread: dict[str, tuple[Above0, Above0]] = {}
    group: AtLeast0 = 0.0  # seconds that each group adds to the time of a grouped matmul


class MeasuredCollective(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fitted time of a collective with one algorithm, over groups of `ranks` ranks with stride `stride`. All groups
    of the axis run at the same time. n bytes take `latency` + n `per_byte` seconds. n is the size of the whole buffer,
    after a gather or before a reduction; for a send, it is the size of the message."""

    axis: str
    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send, ring
    algorithm: str
    ranks: Annotated[int, Meta(ge=2)]
    stride: Annotated[int, Meta(ge=1)] = 1
    latency: AtLeast0  # seconds
    per_byte: AtLeast0  # seconds
    # Largest buffer for which the engine uses the algorithm; None: no limit.
    most_bytes: Annotated[int, Meta(ge=1)] | None = None
    error: AtLeast0 = 0.0  # median relative deviation of the measured times from the fitted line
    # For the hierarchical algorithm: number of ranks of a node.
    node: Annotated[int, Meta(ge=1)] | None = None


class Measurement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of `engine probe`, and the conditions under which they were made. All ranks measure at the same
    time, so with more ranks than `cores` each measured time includes waiting for a core."""

    ranks: Annotated[int, Meta(ge=1)]  # number of ranks of the probe
    # Cores that the ranks of a machine share; None: each rank has its own GPU.
    cores: Annotated[int, Meta(ge=1)] | None = None
    local_ranks: Annotated[int, Meta(ge=1)] = 1  # number of ranks on a machine
    backend: str = "gloo"
    precision: str = "fp32"
    oversubscribed: bool = False  # whether a machine has more ranks than cores
    operation_cpu: AtLeast0 = 0.0  # CPU seconds that the host takes to dispatch an operation
    pointwise: Annotated[float, Meta(ge=0, le=1e18)] = 0.0  # bytes/s; 0: the memory bandwidth
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
