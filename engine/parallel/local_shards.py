"""This rank's shard of a DTensor: with gradients for the forward pass, without for everything else."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a parameter or gradient that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_weight(weight: Tensor) -> Tensor:
    """The shard this rank multiplies by."""
    if not isinstance(weight, DTensor):
        return weight
    part: Tensor = _Local.apply(weight)  # type: ignore[no-untyped-call]
    return part


class _Local(torch.autograd.Function):
    """`DTensor.to_local`, but a gradient is wrapped once a step and not at each micro-batch.

    Wrapping and the DTensor's own addition cost more than the gradients of a small layer. So later micro-batches are
    added to the shard of the gradient that is there, which then takes the place of the new one.
    """

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.weight = weight
        part = weight.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight = ctx.weight
        if weight.grad is None:
            return DTensor.from_local(grad, weight.device_mesh, weight.placements, run_check=False)
        total = weight.grad
        total.to_local().add_(grad)
        weight.grad = None
        return total
