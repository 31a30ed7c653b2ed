"""Checks that this machine has enough memory and GPUs for the run. Does not import torch, because it runs before any
rank is started."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from engine.config.layout import Layout
from engine.config.sizes import parameter_count
from engine.planner.memory.plan import least_bytes
from engine.planner.workload.job import Job

MIN_RANK_BYTES = 32 * 2**20  # bytes: minimum private memory of a forked rank


def memory_refusal(layout: Layout) -> str | None:
    """An error message if this machine has too little memory for the run, else None. The check ignores activations, so
    a run that passes it may still run out of memory."""
    available, world = psutil.virtual_memory().total, layout.ranks.world
    if world * MIN_RANK_BYTES > available:
        return (
            f"the layout has {world} ranks, but this machine's memory is {_gib(available)}, enough for at "
            f"most {available // MIN_RANK_BYTES}; legal: fewer ranks, or several machines (torchrun, Slurm)"
        )
    if layout.model.own:  # its size is not known before its code is loaded
        return None
    count = parameter_count(layout.model)
    least = least_bytes(Job.of(layout))
    if least > available and not sees_gpu():
        return (
            f"the model's {count:,} parameters take at least {_gib(least)} with gradients and the optimizer's state, "
            f"but this machine's memory is {_gib(available)}; legal: a smaller model, a GPU, or several machines"
        )
    return None


def device_refusal(ranks: int, wanted: str) -> str | None:
    """An error message if `wanted` is "cuda" and this machine has fewer than `ranks` GPUs, else None."""
    if wanted != "cuda":
        return None
    gpus = _usable_gpus()
    return too_few_gpus(gpus, ranks) if gpus is not None and gpus < ranks else None


def too_few_gpus(gpus: int, ranks: int) -> str:
    """The error message for `--device cuda` on a machine with fewer GPUs than ranks."""
    return (
        f"--device cuda needs a GPU for each of {ranks} ranks on this machine, but torch can use {gpus}; "
        "legal: --device auto or cpu, or fewer ranks"
    )


def _usable_gpus() -> int | None:
    """Number of GPUs that torch can use, or None if the number cannot be determined. Runs torch in a subprocess,
    because a process that has initialised CUDA must not fork."""
    command = [sys.executable, "-c", "from engine.device import usable_gpus; print(usable_gpus())"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return int(subprocess.run(command, env=environ, capture_output=True, check=True, timeout=120).stdout)
    return None


def _gib(size: float) -> str:
    return f"{size / 2**30:,.0f} GiB"


def sees_gpu() -> bool:
    """Whether a GPU's device file exists. CUDA is not used, because a process that has initialised it must not fork."""
    return any(Path("/dev").glob("nvidia[0-9]*"))
