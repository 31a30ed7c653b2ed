"""Torch settings that a rank applies before it creates its process group: flight recorder, determinism, time-outs."""

import os
from collections.abc import Iterable, MutableMapping
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout

FLIGHT = "flight"  # folder of the flight recorder's dumps, in the run's folder
RECORDED = 2000  # collectives that the flight recorder keeps
# Each pair has the name in newer and in older versions of torch.
BUFFER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
DUMP_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def record_flight(environ: MutableMapping[str, str], run_dir: Path) -> Path:
    """Turn on torch's flight recorder for NCCL: if a collective times out, each rank writes its last collectives to
    ``flight/rank_N`` in the run's folder. Returns the path of the folder ``flight``. Values that the user has set are
    kept."""
    folder = run_dir / FLIGHT
    folder.mkdir(parents=True, exist_ok=True)
    settings = dict.fromkeys(BUFFER_NAMES, str(RECORDED)) | dict.fromkeys(DUMP_NAMES, f"{folder / 'rank_'}")
    for name, value in (settings | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}).items():
        environ.setdefault(name, value)
    return folder


def use_deterministic_algorithms() -> None:
    """Make torch use only algorithms whose results are bitwise equal in every run with the same layout and machines.
    If an operation has no such deterministic algorithm, torch raises RuntimeError."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this variable when it starts
    torch.use_deterministic_algorithms(True)
    # The engine reads no memory before it writes it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def time_out_after(seconds: int | None) -> timedelta | None:
    """`run.timeout_s` as the `timedelta` that torch expects; None: torch's default."""
    return None if seconds is None else timedelta(seconds=seconds)


def set_timeouts(groups: Iterable[ProcessGroup | None], seconds: int | None) -> None:
    """Set the time-out of each group in `groups`. This is needed because torch does not give a group the time-out of
    the default group when it creates the group."""
    for group in groups:
        if seconds is not None and group is not None:
            _set_pg_timeout(timedelta(seconds=seconds), group)
