"""Whether this machine has room for a run whose ranks are all on it. Torch-free: asked before anything is started."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from engine.config.layout import Layout
from engine.config.sizes import parameter_count

OF_A_RANK = 32 * 2**20  # bytes: the least that a forked rank has for itself, whatever it trains
STATES = {"sgd": 2, "adamw": 4}  # fp32 numbers a parameter: weight, gradient, and what the optimizer keeps


def memory_refusal(layout: Layout) -> str | None:
    """Why the ranks cannot all be here, in one sentence, or None. The least they take: activations are not counted."""
    here, world = psutil.virtual_memory().total, layout.ranks.world
    if world * OF_A_RANK > here:
        return (
            f"the layout has {world} ranks, and this machine's memory is {_gib(here)}, enough for "
            f"{here // OF_A_RANK} at most; legal: fewer, or several machines (torchrun, Slurm)"
        )
    count = parameter_count(layout.model)
    least = count * 4 * STATES[layout.train.optimizer] * layout.grid.dp_replicate
    if least > here and not _sees_gpu():
        return (
            f"the model's {count:,} parameters take at least {_gib(least)} with gradients and the optimizer's state, "
            f"and this machine's memory is {_gib(here)}; legal: a smaller model, a GPU, or several machines"
        )
    return None


def device_refusal(ranks: int, wanted: str) -> str | None:
    """Why `ranks` of this machine cannot have a GPU each where that is `wanted`, or None."""
    if wanted != "cuda":
        return None
    gpus = _usable_gpus()
    return too_few_gpus(gpus, ranks) if gpus is not None and gpus < ranks else None


def too_few_gpus(gpus: int, ranks: int) -> str:
    return (
        f"--device cuda needs a GPU for each of {ranks} ranks of this machine, and torch can use {gpus}; "
        "legal: --device auto or cpu, or fewer ranks"
    )


def _usable_gpus() -> int | None:
    """As torch counts them, in a process of its own: one that has asked CUDA cannot be forked. None: it did not say."""
    ask = [sys.executable, "-c", "from engine.device import usable_gpus; print(usable_gpus())"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return int(subprocess.run(ask, env=environ, capture_output=True, check=True, timeout=120).stdout)
    return None


def _gib(size: int) -> str:
    return f"{size / 2**30:,.0f} GiB"


def _sees_gpu() -> bool:
    """By its device file: a process that has asked CUDA cannot be forked."""
    return any(Path("/dev").glob("nvidia[0-9]*"))
