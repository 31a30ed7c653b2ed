"""What a rank's agent finds out about its device and its machine, on its own thread and never the trainer's."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agents.protocol import Vitals
from agents.rank.nvml import Gpu

Source = Callable[[], dict[str, Any]]
"""Reads some fields of `Vitals`."""


@dataclass(frozen=True)
class Sensors:
    """What to read for one rank; nothing of it is touched before `open`.

    `device`: the UUID of its GPU, or the number that CUDA gives it in this process; None: it has none. `host`: whether
    it speaks for its machine, as one rank of each does.
    """

    device: str | int | None = None
    host: bool = False

    def open(self) -> "Reader":
        """Find what there is; whatever is missing has no data. To be called where the reading is done."""
        sources: list[Source] = []
        if self.device is not None and (gpu := open_gpu(self.device)):
            sources.append(gpu.read)
        if self.host and (host := open_host()):
            sources.append(host)
        return Reader(sources)


class Reader:
    """Reads all there is; a source that fails has no data that time."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources

    def read(self, rank: int, step: int) -> Vitals | None:
        """None where there is nothing to tell."""
        fields: dict[str, Any] = {}
        for source in self._sources:
            try:
                fields |= source()
            except Exception:  # noqa: BLE001 - a device that is lost takes nothing else with it
                continue
        known = {name: value for name, value in fields.items() if value is not None}
        return Vitals(rank, step, **known) if known else None


def open_gpu(device: str | int, module: str = "pynvml") -> Gpu | None:
    """The GPU, if nvidia-ml-py, a driver and the device are there."""
    try:
        return Gpu(importlib.import_module(module), device, os.environ)
    except Exception:  # noqa: BLE001 - not installed, no driver, no device, or a module that only bears the name
        return None


def open_host() -> Source | None:
    """The machine's CPU and memory, if psutil is there."""
    try:
        psutil = importlib.import_module("psutil")
        psutil.cpu_percent(None)  # the first answer would be of no time at all
    except Exception:  # noqa: BLE001 - not installed, or a machine that it cannot read
        return None

    def read() -> dict[str, Any]:
        memory = psutil.virtual_memory()
        return {
            "host_cpu_percent": float(psutil.cpu_percent(None)),
            "host_memory_bytes": int(memory.total - memory.available),
            "host_memory_total": int(memory.total),
        }

    return read
