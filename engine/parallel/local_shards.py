"""Accesses this rank's shard of a DTensor: with gradients for the forward pass, without gradients otherwise."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter or gradient, outside autograd; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_layout_of(tensor: Tensor, shard: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """`shard` as a DTensor with the shape and placements of `tensor`; `shard` itself if `tensor` is a plain tensor.
    `mesh`: the mesh of the result; default: that of `tensor`. It must be a mesh of the shard's device, because torch
    would copy the shard to the mesh's device."""
    if not isinstance(tensor, DTensor):
        return shard
    mesh = tensor.device_mesh if mesh is None else mesh
    assert shard.device.type in (mesh.device_type, "meta"), (shard.device, mesh)
    return DTensor.from_local(
        shard,
        mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local_weight(weight: Tensor) -> Tensor:
    """This rank's shard of a weight, for use in the forward pass; autograd passes the shard's gradient on to the
    weight."""
    if not isinstance(weight, DTensor):
        return weight
    part: Tensor = _Local.apply(weight)  # type: ignore[no-untyped-call]
    return part


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by this rank's shard of a weight and add this rank's shard of a bias: [..., in] -> [..., out]."""
    return F.linear(x, local_weight(weight), None if bias is None else local_weight(bias))


class _Local(torch.autograd.Function):
    """Like `DTensor.to_local`, but its backward wraps the gradient in a DTensor once per step instead of once per
    micro-batch.

    Wrapping and adding DTensors takes longer than computing the gradients of a small layer. So from the second
    micro-batch of a step on, backward adds to the local tensor of the existing gradient and returns this gradient.
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
