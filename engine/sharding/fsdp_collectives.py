"""The all-gather and the reduce-scatter that FSDP2 calls: both go through the metered `Axis`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.collectives import AsyncCollective, Axis


class _CustomCollective:
    """What FSDP2 asks of a custom collective: a buffer, and the call. torch does not export the base class of it."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _PendingGather(dist.Work):
    """A gather that FSDP2 awaits where it first needs the parameters."""

    def __init__(self, started: AsyncCollective):
        super().__init__()
        self._started = started

    def wait(self, timeout: Any = None) -> bool:
        self._started.wait()
        return True


class AllGather(_CustomCollective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        return _PendingGather(self.axis.start_all_gather(output_tensor, input_tensor))


class ReduceScatter(_CustomCollective):
    def __init__(self, axis: Axis, started: Callable[[AsyncCollective], None]):
        super().__init__(axis)
        self._started = started

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        self._started(self.axis.start_reduce_scatter(output_tensor, input_tensor))
