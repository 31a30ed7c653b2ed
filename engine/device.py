"""Chooses the device of a rank (one GPU per rank of this machine, or the CPU) and reports its properties.

Call these functions in a rank, never in its parent: a process that has initialised CUDA must not fork.
"""

from typing import Literal

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from agents.rundir.runs import RunError
from engine.planner.hardware.peaks import peak_flops
from engine.preflight.memory import too_few_gpus

DeviceChoice = Literal["auto", "cpu", "cuda"]

CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def usable_gpus() -> int:
    """Number of GPUs that CUDA and NCCL can use, limited by CUDA_VISIBLE_DEVICES."""
    return torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0


def choose_device(local_rank: int, local_world: int, wanted: str = "auto") -> torch.device:
    """Returns the GPU with index `local_rank` if this process can use at least `local_world` GPUs, else the CPU.

    `wanted` is "auto", "cpu" or "cuda". Raises RunError if `wanted` is "cuda" and there are too few GPUs.
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
    """The device of the default process group: this process's current GPU for NCCL, the CPU for gloo."""
    if dist.get_backend() == BACKENDS["cuda"]:
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


def device_name(device: torch.device) -> str:
    """Name to display, such as ``cpu`` or ``cuda:0 NVIDIA H100 80GB HBM3``."""
    return str(device) if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


def device_uuid(device: torch.device) -> str | None:
    """The UUID by which NVML finds the GPU; None for the CPU. CUDA's device numbers do not identify a GPU, because they
    can differ between processes."""
    return None if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def set_device(device: torch.device) -> None:
    """Make `device` the current CUDA device. Call this function before the process group is created."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy the host tensor `x` to `device`. The copy to a GPU is asynchronous, from pinned memory."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def matmul_peak(device: torch.device, precision: str) -> float | None:
    """Dense peak FLOP/s of matmuls in a layout's `precision`; None if unknown."""
    if device.type == "cpu":
        return None
    if precision == "fp16":
        precision = "bf16"  # GPUs have the same peak for fp16 and bf16
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    return peak_flops(torch.cuda.get_device_name(device), precision)


class DeviceMemory:
    """Measures memory in bytes: for a GPU, the peak memory allocated to tensors since the last call; for the CPU, the
    current resident memory of the process."""

    def __init__(self, device: torch.device):
        self._device, self._process = device, psutil.Process()

    def __call__(self) -> int:
        if self._device.type == "cpu":
            return int(self._process.memory_info().rss)
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(most)
