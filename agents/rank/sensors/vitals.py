"""Reads the vital signs of a rank's GPU and machine (utilization, memory, temperature, ...), in the agent's thread and
never in the trainer's thread."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from agents.protocol import Vitals
from agents.rank.sensors.nvml import Gpu

Source = Callable[[], dict[str, Any]]
"""Reads some fields of `Vitals`."""


@dataclass(frozen=True)
class Sensors:
    """The sensors to read for one rank; `open` opens them.

    `device`: the UUID of the rank's GPU, or its CUDA index in this process; None without a GPU. `host`: whether this
    rank reports the CPU and memory use of its machine; one rank per machine does so. `process`: whether this process
    trains; if False, it forwards the records of another process, and its own CPU time and stacks are not reported.
    """

    device: str | int | None = None
    host: bool = False
    process: bool = True

    def open(self) -> "Reader":
        """Open the sensors that exist; the reader has no data for the other sensors. Call `open` in the thread that
        reads the sensors.
        """
        sources: list[Source] = []
        if self.device is not None and (gpu := open_gpu(self.device)):
            sources.append(gpu.read)
        if self.host and (host := open_host()):
            sources.append(host)
        return Reader(sources)


class Reader:
    """Reads the vital signs from `sources`, each of which reads some fields of `Vitals`. If a source fails, its fields
    are left out."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources

    def read(self, rank: int, step: int) -> Vitals | None:
        """Read the vital signs; None if no source has data."""
        fields: dict[str, Any] = {}
        for source in self._sources:
            try:
                fields |= source()
            except Exception:  # noqa: BLE001 - the other sources still have data
                continue
        known = {name: value for name, value in fields.items() if value is not None}
        return Vitals(rank, step, **known) if known else None


def open_gpu(device: str | int, module: str = "pynvml") -> Gpu | None:
    """A reader of the GPU; None if nvidia-ml-py, the driver or the device is missing."""
    try:
        return Gpu(importlib.import_module(module), device, os.environ)
    except Exception:  # noqa: BLE001 - not installed, no driver, no device, or another module of that name
        return None


def open_host() -> Source | None:
    """A source that reads the machine's CPU and memory use; None if psutil cannot read them."""
    try:
        psutil.cpu_percent(None)  # the first call returns a meaningless 0.0
    except Exception:  # noqa: BLE001 - a machine that psutil cannot read
        return None

    def read() -> dict[str, Any]:
        memory = psutil.virtual_memory()
        return {
            "host_cpu_percent": float(psutil.cpu_percent(None)),
            "host_memory_bytes": int(memory.total - memory.available),
            "host_memory_total": int(memory.total),
        }

    return read
