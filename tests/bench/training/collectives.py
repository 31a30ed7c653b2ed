"""Compares gloo's own collectives with those of `engine/parallel/collectives.py`, which use all-to-alls."""

import tempfile
import time
from pathlib import Path
from statistics import median

from engine.launch.processes.local_ranks import launch
from engine.rendezvous import RankContext

RANKS = (2, 4, 8)
NUMBERS = 4096  # fp32: 16 KiB
ROUNDS = 60


def measure(context: RankContext) -> None:
    import torch
    import torch.distributed as dist

    from engine.metering.meter import Meter
    from engine.parallel.collectives import Axis, all_gather_single, reduce_scatter_single

    dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.world)
    world = dist.group.WORLD
    axis = Axis("tp", world, Meter())
    x = torch.randn(NUMBERS)
    rows = torch.randn(context.world, NUMBERS // context.world)
    part, everything = torch.empty(NUMBERS // context.world), torch.empty(context.world * NUMBERS)
    pairs = {
        "all-reduce": (lambda: dist.all_reduce(x), lambda: axis.all_reduce(x)),
        "reduce-scatter": (
            lambda: reduce_scatter_single(part, rows.view(-1)),
            lambda: axis.reduce_scatter(rows),
        ),
        "all-gather": (lambda: all_gather_single(everything, x), lambda: axis.all_gather(x)),
    }
    for name, forms in pairs.items():
        took: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):
            for form, times in zip(forms, took, strict=True):
                begin = time.perf_counter()
                form()
                times.append(time.perf_counter() - begin)
        ring, direct = (median(times[5:]) * 1e6 for times in took)
        if context.rank == 0:
            print(
                f"  {context.world} ranks  {name:14}  ring {ring:7.0f} us   all-to-all {direct:7.0f} us",
                end="",
            )
            print(f"   ratio {ring / direct:.2f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    for world in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            launch(world, measure, name_of_rank=str, hub="none", run="bench", run_dir=Path(folder))
