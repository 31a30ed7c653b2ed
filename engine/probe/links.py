"""Measures, for each parallelism axis, the collectives that the engine runs on it."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config.grid import Grid
from engine.parallel.collectives import SMALL_ALL_REDUCE_BYTES, Axis
from engine.parallel.mesh import World
from engine.planner.hardware.description import MeasuredCollective
from engine.probe.line import Point, fit
from engine.probe.stopwatch import Operation

SIZES = tuple(2**n for n in range(10, 23, 2))  # bytes: 1 KiB to 4 MiB
GATHERS = ("all_gather", "reduce_scatter", "all_reduce")
KINDS = {  # axis -> collectives of a training step on it
    "tp": GATHERS,
    "cp": ("ring", "all_to_all"),
    "ep": ("all_to_all",),
    "dp": GATHERS,
    "replicas": ("all_reduce",),
    "edp": GATHERS,
    "pp": ("send",),
    "control": ("all_gather",),
}
WIDTH = 4  # bytes of an element


def strides(grid: Grid) -> dict[str, int]:
    """The stride of each axis: the difference between the global ranks of two neighbours on the axis."""
    return {
        "tp": 1,
        "cp": grid.tp,
        "ep": 1,
        "dp": grid.tp,
        "replicas": grid.fsdp * grid.tp,
        "edp": grid.ep,
        "pp": grid.world // grid.pp,
        "control": 1,
    }


class Call(NamedTuple):
    """A collective on an axis with a buffer of `size` bytes."""

    axis: str
    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.axis} {self.kind.replace('_', '-')}, {self.size / 1024:g} KiB"


WORK = Call("", "work between", 0)


def calls(world: World, sizes: Sequence[int]) -> dict[Call, Callable[[], Operation]]:
    """Every collective of `KINDS` on every axis with more than one rank; all groups of an axis run at the same time.

    On a CPU, each call first computes a matmul. In a training step, collectives also follow computation, and ranks that
    share cores reach a collective at different times. The call `WORK` runs only the matmul; `fitted` subtracts the time
    of `WORK` from the times of the other calls.
    """
    work = _work() if world.device.type == "cpu" else None
    alone: dict[Call, Callable[[], Operation]] = {WORK: lambda: work} if work else {}
    return alone | {
        Call(name, kind, size): partial(
            _with, work, partial(_call, getattr(world, name), kind, size, world.device)
        )
        for name, kinds in KINDS.items()
        if getattr(world, name).size > 1
        for kind in kinds
        for size in sizes
    }


def _work() -> Operation:
    a = torch.ones(192, 192)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def _with(work: Operation | None, make: Callable[[], Operation]) -> Operation:
    """An operation that runs the matmul `work` (if not None) and then the collective that `make()` prepares."""
    call = make()

    def both() -> None:
        if work:
            work()
        call()

    return both


def _call(axis: Axis, kind: str, size: int, device: torch.device) -> Operation:
    """A function that runs the collective on a buffer of about `size` bytes, through the `Axis` method that training
    uses."""
    device = torch.device("cpu") if axis.name == "control" else device
    each = max(1, size // WIDTH // axis.size)
    part, whole = torch.ones(each, device=device), torch.ones(axis.size * each, device=device)
    if kind == "all_gather":
        if axis.name == "dp":
            return lambda: axis.start_all_gather(whole, part).wait()
        return lambda: axis.all_gather(part)
    if kind == "reduce_scatter":
        if axis.name == "dp":
            return lambda: axis.start_reduce_scatter(part, whole).wait()
        return lambda: axis.reduce_scatter(whole.view(axis.size, each))
    if kind == "all_reduce":
        return lambda: axis.all_reduce(whole)
    if kind == "all_to_all":
        rows, equal = whole.view(-1, 1), [each] * axis.size
        return lambda: axis.all_to_all(rows, equal, equal)
    message = torch.ones(max(1, size // WIDTH), device=device)
    if kind == "ring":
        return lambda: axis.start_ring(message)[0].wait()
    return lambda: _there_and_back(axis, message)


def _there_and_back(axis: Axis, message: Tensor) -> None:
    """Ranks 0 and 1, 2 and 3, ... of the axis send a message back and forth. If the number of ranks is odd, the last
    rank does nothing."""
    peer = axis.rank ^ 1
    if peer >= axis.size:
        return
    for sending in (axis.rank < peer, axis.rank > peer):
        operation = dist.P2POp(
            dist.isend if sending else dist.irecv, message, group=axis.group, group_peer=peer
        )
        for work in dist.batch_isend_irecv([operation]):
            work.wait()


def fitted(world: World, seconds: Mapping[Call, float], gloo: bool) -> Iterator[MeasuredCollective]:
    """Fit the latency and the seconds per byte of each collective, separately for each algorithm that the engine uses
    for it."""
    points: defaultdict[tuple[str, str], list[Point]] = defaultdict(list)
    work = seconds.get(WORK, 0.0)
    for call, taken in seconds.items():
        if call != WORK:
            alone = max(taken / 10, taken - work)
            points[call.axis, call.kind].append((call.size, alone / 2 if call.kind == "send" else alone))
    for (name, kind), timed in points.items():
        ranks = getattr(world, name).size
        for algorithm, some, most in _by_algorithm(kind, timed, gloo, SMALL_ALL_REDUCE_BYTES // ranks):
            if some:
                line = fit(some)
                yield MeasuredCollective(
                    axis="dp" if name in ("edp", "replicas") else name,
                    kind=kind,
                    algorithm=algorithm,
                    ranks=ranks,
                    stride=strides(world.grid)[name],
                    latency=line.latency,
                    per_byte=line.slope,
                    most_bytes=most,
                    error=line.error,
                )


def _by_algorithm(
    kind: str, points: list[Point], gloo: bool, small: int
) -> Iterator[tuple[str, list[Point], int | None]]:
    """On gloo, a large all-reduce runs as a ring; a small all-reduce, an all-gather and a reduce-scatter each run as a
    single all-to-all. NCCL chooses its own algorithms."""
    if not gloo:
        yield "nccl", points, None
    elif kind != "all_reduce":
        yield "direct", points, None
    else:
        yield "direct", [point for point in points if point[0] <= small], small
        yield "ring", [point for point in points if point[0] > small], None
