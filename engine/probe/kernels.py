"""Measures the speed of a rank: matmuls, grouped matmuls, attention, memory and the dispatch of operations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.sections.knobs import Knobs
from engine.config.sections.model import Model
from engine.config.sections.training import Train
from engine.kernels.flash_attention import causal_attention
from engine.kernels.grouped import grouped
from engine.metering.meter import Meter
from engine.model.loss import cross_entropy
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.parameters import ParameterFactory
from engine.planner.hardware.description import Device, Efficiency, Hardware
from engine.planner.timing.kernels import Kernels as PlannedKernels
from engine.planner.timing.on_cores import DENSE, EMBEDDING, HEAD
from engine.planner.workload.end_work import embedding_work, head_work
from engine.planner.workload.job import Job
from engine.planner.workload.layer_work import layer_work
from engine.planner.workload.operations import AttentionCore, Gemm, Memory
from engine.probe.line import fit
from engine.probe.stopwatch import Operation, Stopwatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SQUARES = {"cpu": (32, 64, 128, 256, 384, 512), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
KEYS = {"cpu": 512, "cuda": 4096}  # sequence length of the measured attention
HEADS, WIDTH = 4, 256  # heads of the measured attention; width of the measured grouped matmul
GROUPS, ROWS = 8, {"cpu": 64, "cuda": 512}  # groups of the grouped matmul, and rows of each group
BEYOND = 1.25  # maximum extrapolated rate, relative to the best rate that a square matmul reached
COPIED = {"cpu": 2**24, "cuda": 2**28}  # number of elements to copy, far more than fit into a cache
# So small that only the host's operations take time.
TINY = Model(layers=2, d_model=16, heads=2, seq_len=4, vocab=16)
# On a CPU the rate of pointwise work is derived from the time of these layers (`pointwise_rate`).
MIDDLE, MIDDLE_BATCH = Model(layers=2, d_model=128, heads=4, seq_len=64, vocab=256, d_ff=512), 8


@dataclass(frozen=True)
class Kernels:
    """The rates at which one rank computes and reads memory, as measured. `efficiency`: fractions of `peak` and
    `memory_bandwidth` that the rank reaches."""

    peak: float  # FLOP/s of a large square matmul
    memory_bandwidth: float  # bytes/s
    efficiency: Efficiency
    operation_cpu: float  # CPU seconds that the host takes to dispatch an operation
    pointwise: float  # bytes/s of pointwise work; 0: not measured
    squares: tuple[tuple[float, float], ...]  # (rows, FLOP/s)


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Calls:
    """The operations that `engine probe` times on a rank, and the computation of the rates from their times."""

    def __init__(self, layout: Layout, device: torch.device, short: bool = False):
        kind, dtype = device.type, DTYPES[layout.train.precision]
        self._squares = SQUARES[kind][: 4 if short and kind == "cpu" else None]
        self._keys, self._rows, self._copied = KEYS[kind], ROWS[kind], COPIED[kind]
        self._layer = layers(TINY, 1, device)
        width = layout.model.head_width
        self.makes: dict[str, Callable[[], Operation]] = {
            "operations of the host": lambda: self._layer,
            **({"layers": lambda: layers(MIDDLE, MIDDLE_BATCH, device)} if kind == "cpu" else {}),
            "copy": partial(_copy, self._copied, device),
            "attention": partial(_attention, self._keys, width, device, dtype),
            "grouped product": partial(_grouped, self._rows, device, dtype),
            **{f"product {n} x {n}": partial(_square, n, device, dtype) for n in self._squares},
        }
        self._head_dim = width

    def rates(self, seconds: Mapping[str, float], watch: Stopwatch) -> Kernels:
        """Compute the rates from `seconds`, the measured time of each operation in `makes`. All ranks must call this
        method."""
        with OperationCount() as counted:
            self._layer()
        squares = [(n, seconds[f"product {n} x {n}"]) for n in self._squares]
        peak, half = rate_and_half(squares)
        keys, rows = self._keys, self._rows
        # The forward pass of causal attention has two matmuls, each over half of the queries x keys square.
        attention = 2 * HEADS * keys * keys * self._head_dim / seconds["attention"]
        group = seconds["grouped product"] / GROUPS
        product = 2 * rows * WIDTH * WIDTH / peak * (1 + half * (1 / rows + 2 / WIDTH))
        bandwidth = 2 * 4 * self._copied / seconds["copy"]
        efficiency = Efficiency(
            gemm=1.0,
            half_rows=half,
            attention=min(1.0, attention / peak * (1 + half / keys)),
            memory=1.0,
            link=1.0,
            operation=seconds["operations of the host"] / counted.count,
            group=max(0.0, group - product),
        )
        return Kernels(
            peak,
            bandwidth,
            efficiency,
            watch.cpu_seconds(self._layer) / counted.count,
            pointwise_rate(seconds["layers"], peak, bandwidth, efficiency) if "layers" in seconds else 0.0,
            tuple((float(n), 2 * n**3 / taken) for n, taken in squares),
        )


def rate_and_half(points: list[tuple[int, float]]) -> tuple[float, float]:
    """FLOP/s of large matmuls, and the number of rows at which a matmul reaches half of that rate.

    `points` are (n, seconds) of n x n matmuls. Such a matmul takes 2 n^3 (1 + 3 half / n) / rate seconds, so its time
    per FLOP is linear in 1/n (`engine.planner.timing.kernels`). The rate is at most `BEYOND` times the best measured
    rate. With this rate, each measured matmul gives one value of the formula's variable `half`; the median of these
    values is returned (0 if it is negative).
    """
    line = fit([(1 / n, seconds / (2 * n**3)) for n, seconds in points])
    best = max(2 * n**3 / seconds for n, seconds in points)
    peak = min(BEYOND * best, 1 / line.latency) if line.latency else best
    lost = sorted((seconds * peak / (2 * n**3) - 1) * n / 3 for n, seconds in points)
    return peak, max(0.0, lost[len(lost) // 2])


def pointwise_rate(seconds: float, peak: float, bandwidth: float, efficiency: Efficiency) -> float:
    """Memory bandwidth (bytes/s) that pointwise operations reach in the small model `MIDDLE`; `seconds` is the measured
    time of its forward pass, loss and backward pass. The time of the pointwise operations is assumed to be `seconds`
    minus the predicted time of the matmuls, of attention, and of torch's dispatch of all operations on the host, but at
    least a tenth of `seconds`."""
    device = Device(1.0, bandwidth, {"fp32": peak}, "")
    job = Job.of(Layout(model=MIDDLE, train=Train(global_batch=MIDDLE_BATCH), knobs=Knobs(micro_batches=1)))
    kernels = PlannedKernels(Hardware("", device, (), efficiency), "fp32")
    works = [layer_work(job, layer) for layer in job.model.layers] + [embedding_work(job), head_work(job)]
    operations = [operation for work in works for operation in (*work.forward, *work.backward)]
    known = sum(kernels.gemm(op) for op in operations if isinstance(op, Gemm))
    known += sum(kernels.attention(op) for op in operations if isinstance(op, AttentionCore))
    known += efficiency.operation * (sum(DENSE) * MIDDLE.layers + sum(EMBEDDING) + sum(HEAD))
    moved = sum(op.bytes for op in operations if isinstance(op, Memory))
    return moved / max(0.1 * seconds, seconds - known)


def layers(model: Model, batch: int, device: torch.device) -> Operation:
    """An operation that runs the forward pass, loss and backward pass of a model on this rank alone."""
    meter = Meter(model.layers, 0, device=device)
    alone = Axis("tp", None, meter), Axis("ep", None, meter)
    factory = ParameterFactory(1, *alone, device=device)
    stage = Stage(factory, model, range(model.layers), KnobValues.of(Layout(model=model)), meter)
    tokens = torch.zeros(batch, model.seq_len, dtype=torch.int64, device=device)

    def forward_backward() -> None:
        cross_entropy(stage(tokens), tokens, alone[0]).backward()  # type: ignore[no-untyped-call]

    forward_backward()
    return forward_backward


def _copy(numbers: int, device: torch.device) -> Operation:
    source = torch.randn(numbers, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _square(n: int, device: torch.device, dtype: torch.dtype) -> Operation:
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _attention(keys: int, width: int, device: torch.device, dtype: torch.dtype) -> Operation:
    q, k, v = (torch.randn(1, HEADS, keys, width, device=device, dtype=dtype) for _ in range(3))
    return lambda: causal_attention(q, k, v)


def _grouped(rows: int, device: torch.device, dtype: torch.dtype) -> Operation:
    x = torch.randn(GROUPS * rows, WIDTH, device=device, dtype=dtype)
    weights = torch.randn(GROUPS, WIDTH, WIDTH, device=device, dtype=dtype)
    offsets = torch.arange(rows, GROUPS * rows + 1, rows, dtype=torch.int32, device=device)
    return lambda: grouped(x, weights, offsets)
