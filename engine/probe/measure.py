"""Runs on each rank of `engine probe`: joins the process group, measures, and leaves the group."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from engine.config.layout import Layout
from engine.device import BACKENDS, choose_device, device_name, matmul_peak, set_device
from engine.launch.rank_main import check_same_device, check_same_layout
from engine.metering.meter import Meter
from engine.parallel.mesh import World
from engine.planner.hardware.description import (
    Device,
    Hardware,
    Link,
    MeasuredCollective,
    Measurement,
)
from engine.probe import kernels, links
from engine.probe.kernels import Kernels
from engine.probe.stopwatch import Stopped, Stopwatch
from engine.probe.toml import RESULT
from engine.rendezvous import RankContext, usable_cores


@dataclass(frozen=True)
class Effort:
    """How thorough the measurement is: buffer sizes of the collectives in bytes, seconds per batch of calls, and number
    of batches and passes. `short`: fewer matmul sizes.
    """

    sizes: tuple[int, ...] = links.SIZES
    batch_s: float = 0.03
    batches: int = 3
    passes: int = 2
    short: bool = False


def probe(
    context: RankContext, layout: Layout, device: str, effort: Effort, say: Callable[[str], None]
) -> None:
    """Run the measurements on the rank that `context` describes. Rank 0 computes a hardware description from them and
    writes it to the file `RESULT` in the run's folder.

    Writes nothing if a stop is requested. Raises RefusedError if the layout or the device of this rank differs from
    that of rank 0.
    """
    store = context.store()
    check_same_layout(layout, context, store)
    mine = choose_device(context.local_rank, context.local_world, device)
    check_same_device(mine, context, store)
    set_device(mine)
    dist.init_process_group(
        BACKENDS[mine.type],
        store=PrefixStore("engine/group", store),
        rank=context.rank,
        world_size=context.world,
        device_id=mine if mine.type == "cuda" else None,
    )
    world = World(layout.ranks, Meter(device=mine), mine)
    watch = Stopwatch(
        world.control, context.stop_requested, mine, effort.batch_s, effort.batches, effort.passes
    )

    def doing(text: str) -> None:
        context.set_operation(0, text)
        if context.rank == 0:
            say(text)

    try:
        computed = kernels.Calls(layout, mine, effort.short)
        found = computed.rates(watch.measure(computed.makes, doing), watch)
        exchanged = watch.measure(links.calls(world, effort.sizes), doing)
    except Stopped:
        pass
    else:
        if context.rank == 0:
            gloo = BACKENDS[mine.type] == "gloo"
            lines = tuple(links.fitted(world, exchanged, gloo))
            description = describe(context, layout, mine, found, lines)
            (Path(context.run_dir) / RESULT).write_bytes(msgspec.json.encode(description))
    dist.barrier()
    dist.destroy_process_group()


def describe(
    context: RankContext,
    layout: Layout,
    device: torch.device,
    found: Kernels,
    collectives: tuple[MeasuredCollective, ...],
) -> Hardware:
    """Build the hardware description from the measured rates. The peak is the measured rate of large matmuls or, if it
    is known and higher, the rate in the GPU's data sheet. The measured rate is stored as a share of the peak."""
    precision, cpu = layout.train.precision, device.type == "cpu"
    sheet = matmul_peak(device, precision)
    peak = sheet if sheet and sheet > found.peak else found.peak
    share = found.peak / peak
    shares = msgspec.structs.replace(
        found.efficiency, gemm=share, attention=min(1.0, found.efficiency.attention * share)
    )
    cores = usable_cores() if cpu else None
    source = f"engine probe, {context.world} ranks on {device_name(device)}"
    measurement = Measurement(
        ranks=context.world,
        cores=cores,
        local_ranks=context.local_world,
        backend=BACKENDS[device.type],
        precision=precision,
        oversubscribed=cores is not None and context.local_world > cores,
        operation_cpu=found.operation_cpu,
        pointwise=found.pointwise,
        collectives=collectives,
    )
    return Hardware(
        f"{layout.run.name}-{context.world}",
        Device(_memory(device, context.local_world), found.memory_bandwidth, {precision: peak}, source),
        _links(collectives, context, source),
        shares,
        measurement,
    )


def _memory(device: torch.device, local_world: int) -> float:
    """Bytes of memory for one rank: the memory of its GPU, or an equal share of the machine's memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total / local_world)


def _links(
    collectives: tuple[MeasuredCollective, ...], context: RankContext, source: str
) -> tuple[Link, ...]:
    """One `Link` for the links within a machine and one for those between machines. A link is left out if no collective
    was measured on it; if no collective was measured at all, one link with assumed values is returned. The planner uses
    these links for layouts whose collectives were not measured. Latency and bandwidth are medians over the measured
    collectives."""
    inside = [one for one in collectives if one.ranks * one.stride <= context.local_world]
    across = [one for one in collectives if one.ranks * one.stride > context.local_world]
    levels = []
    if inside:
        levels.append(_link("machine", context.local_world if across else None, inside, source))
    if across:
        levels.append(_link("network", None, across, source))
    return tuple(levels) or (Link("none measured", None, 0.0, 1e9, "assumed: the layout has one rank"),)


def _link(name: str, ranks: int | None, rows: list[MeasuredCollective], source: str) -> Link:
    from engine.planner.timing.measured import per_message

    latencies, slopes = zip(*(per_message(row) for row in rows), strict=True)
    slope = sorted(slopes)[len(slopes) // 2]
    latency = sorted(latencies)[len(latencies) // 2]
    return Link(name, ranks, latency, 1 / max(slope, 1e-13), source)
