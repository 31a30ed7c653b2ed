"""The device a rank computes on, and what goes with it: one GPU for each rank of this machine, or the CPU.

Asked in the rank and never in the process it is forked from: a process that has spoken to CUDA cannot be forked.
"""

from typing import Literal

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from agents.rundir.runs import RunError
from engine.planner.hardware import peak_flops
from engine.preflight.memory import too_few_gpus

DeviceChoice = Literal["auto", "cpu", "cuda"]

CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def usable_gpus() -> int:
    """GPUs of this machine that a rank may compute and communicate on. CUDA_VISIBLE_DEVICES counts."""
    return torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0


def choose_device(local_rank: int, local_world: int, wanted: str = "auto") -> torch.device:
    """GPU number `local_rank` where this process sees one for each of the machine's `local_world` ranks, else the CPU.

    `wanted` is "auto", "cpu" or "cuda"; RunError, one sentence, where "cuda" cannot be.
    """
    if wanted == "cpu":
        return CPU
    gpus = usable_gpus()
    if gpus >= local_world:
        return torch.device("cuda", local_rank)
    if wanted == "cuda":
        raise RunError(too_few_gpus(gpus, local_world))
    return CPU


def group_device() -> torch.device:
    """The device that the default process group communicates from."""
    if dist.get_backend() == BACKENDS["cuda"]:
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


def device_name(device: torch.device) -> str:
    """As a person knows it: ``cpu``, or ``cuda:0 NVIDIA H100 80GB HBM3``."""
    return str(device) if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


def device_uuid(device: torch.device) -> str | None:
    """By which NVML knows it, whatever number CUDA gives it in this process; None of the CPU."""
    return None if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def set_device(device: torch.device) -> None:
    """Make `device` the one that this process uses; before its process group is made."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` of the host on `device`; through pinned memory, so that nobody waits for the copy."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def matmul_peak(device: torch.device, precision: str) -> float | None:
    """Dense FLOP/s that the device can multiply matrices at, in a layout's `precision`; None where it is not known."""
    if device.type == "cpu":
        return None
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    return peak_flops(torch.cuda.get_device_name(device), precision)


class DeviceMemory:
    """Bytes in use: of a GPU the most that tensors took since the last call, of the CPU what the process takes now."""

    def __init__(self, device: torch.device):
        self._device, self._process = device, psutil.Process()

    def __call__(self) -> int:
        if self._device.type == "cpu":
            return int(self._process.memory_info().rss)
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(most)
