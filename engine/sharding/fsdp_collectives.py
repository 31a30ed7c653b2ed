"""Custom all-gather and reduce-scatter for FSDP2, run and metered by an `Axis`.

On gloo, the collectives run in the background. FSDP2 waits for a gather when the unit runs, and `GradientReductions`
waits for a reduce-scatter before using the gradients. On NCCL, FSDP2 runs the collectives on its own CUDA
streams, so that they overlap with computation. With `async_op`, FSDP2 calls a collective on the compute stream, and
waits for the returned `Work` when the unit runs. Without `async_op`, the collectives return None, because if they
returned a `Work`, FSDP2 would not wait for its own streams.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.collectives import AsyncCollective, Axis


class _CustomCollective:
    """Base class of the custom collectives for FSDP2. FSDP2 calls `allocate` to allocate their buffers. torch has such
    a base class, but does not export it."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _PendingGather(dist.Work):
    """A running gather. FSDP2 calls `wait` when it first needs the gathered parameters."""

    def __init__(self, started: AsyncCollective):
        super().__init__()
        self._started = started

    def wait(self, timeout: Any = None) -> bool:
        self._started.wait()
        return True


class AllGather(_CustomCollective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        started = self.axis.start_all_gather(output_tensor, input_tensor, async_op)
        return _PendingGather(started) if started.in_background else None


class ReduceScatter(_CustomCollective):
    def __init__(self, axis: Axis, on_start: Callable[[AsyncCollective], None]):
        super().__init__(axis)
        self._on_start = on_start

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        self._on_start(self.axis.start_reduce_scatter(output_tensor, input_tensor, async_op))
