"""Runs on each rank of `engine collectives`: measures torch's collectives and the algorithms of
`engine.collectives`."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from engine.collectives.measured import DIRECT, TORCH
from engine.collectives.port import Port
from engine.collectives.table import algorithm, names
from engine.launch.rank_main import join_process_group
from engine.metering.meter import Meter
from engine.parallel.collectives import Axis, all_gather_single, reduce_scatter_single
from engine.probe.report import RESULT, Measured, Settings, Trial
from engine.probe.stopwatch import Operation, Stopped, Stopwatch
from engine.rendezvous import RankContext, usable_cores

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def measure(context: RankContext, settings: Settings, say: Callable[[str], None]) -> None:
    """Time all trials on the rank that `context` describes; rank 0 writes `Measured` to `RESULT` in the run's folder.
    Writes nothing if a stop is requested. Raises RefusedError if the device of this rank differs from that of rank
    0."""
    device = join_process_group(context, context.store(), settings.device)
    group = dist.group.WORLD
    assert group
    meter = Meter(device=device)
    axis, control = Axis("dp", group, meter), Axis("control", dist.new_group(backend="gloo"), meter)
    batch_s, batches, passes = (0.005, 2, 2) if settings.quick else (0.03, 3, 3)
    watch = Stopwatch(control, context.stop_requested, device, batch_s, batches, passes)

    def doing(text: str) -> None:
        context.set_operation(0, text)
        if context.rank == 0:
            say(text)

    try:
        with warnings.catch_warnings():
            # Newer versions of torch rename two collectives; the oldest supported one has only the old names.
            warnings.simplefilter("ignore", FutureWarning)
            times = watch.batches(trials(axis, settings, device), doing)
    except Stopped:
        pass
    else:
        if context.rank == 0:
            found = Measured(
                dist.get_backend(),
                usable_cores() if device.type == "cpu" else None,
                context.local_world,
                list(times.items()),
            )
            (Path(context.run_dir) / RESULT).write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()


def trials(axis: Axis, settings: Settings, device: torch.device) -> dict[Trial, Callable[[], Operation]]:
    """One trial for each collective, algorithm and buffer size in `settings`. The function for a trial prepares the
    collective, and returns a function that runs it once."""
    found: dict[Trial, Callable[[], Operation]] = {}
    for kind in settings.kinds:
        for name in [TORCH, *([DIRECT] if device.type == "cpu" else []), *names(kind, settings.node)]:
            if settings.algorithms and name not in settings.algorithms:
                continue
            for size in settings.buffers:
                trial = Trial(kind, name, size)
                found[trial] = partial(_operation, axis, trial, settings, device)
    return found


def _operation(axis: Axis, trial: Trial, settings: Settings, device: torch.device) -> Operation:
    """Prepare the collective of `trial`, and return a function that runs it once. The buffer contains zeros, so that
    repeated sums remain finite."""
    dtype = DTYPES[settings.dtype]
    x = torch.zeros(trial.size // dtype.itemsize, dtype=dtype, device=device)
    if trial.algorithm in (TORCH, DIRECT):
        own = dict(_own(axis, x, x[: len(x) // axis.size].clone()))
        return own[trial.kind, trial.algorithm]
    assert axis.group
    port = Port.of(axis.group)
    return partial(algorithm(trial.kind, trial.algorithm, settings.node), port, x)


def _own(axis: Axis, x: torch.Tensor, part: torch.Tensor) -> Iterator[tuple[tuple[str, str], Operation]]:
    """Yield (collective, algorithm) and the operation to be measured, for torch's collectives (`TORCH`) and for the
    methods of `Axis` that run the same collective as one all-to-all on gloo (`DIRECT`)."""
    group = axis.group
    yield ("all_reduce", TORCH), lambda: dist.all_reduce(x, group=group)
    yield ("reduce_scatter", TORCH), lambda: reduce_scatter_single(part, x, group=group)
    yield ("all_gather", TORCH), lambda: all_gather_single(x, part, group=group)
    yield ("all_reduce", DIRECT), lambda: axis.direct_all_reduce(x)
    yield ("reduce_scatter", DIRECT), lambda: axis.reduce_scatter(x.view(axis.size, -1))
    yield ("all_gather", DIRECT), lambda: axis.direct_all_gather(part)
