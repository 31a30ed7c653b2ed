"""Collectives with a backward. The backward runs the inverse collective and meters it in the layer of the forward.

Shapes: B sequences, S tokens of a slice, D model, P ranks of the axis. On an axis of size 1 each function returns its
input.
"""

from typing import Any

import torch
from torch import Tensor

from engine.parallel.collectives import Axis


def gather_sequence(x_BSD: Tensor, axis: Axis) -> Tensor:
    """Gather sequence slices to the whole sequence, [B, S, D] -> [B, P S, D]; backward reduce-scatters."""
    return x_BSD if axis.size == 1 else _call(_GatherSequence, x_BSD, axis)


def scatter_sequence(x_BSD: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter partial sums of the whole sequence to slices, [B, P S, D] -> [B, S, D]; backward all-gathers."""
    return x_BSD if axis.size == 1 else _call(_ScatterSequence, x_BSD, axis)


def all_to_all(x_TD: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
    """`Axis.all_to_all`, with uneven rows; backward sends the gradients back."""
    return x_TD if axis.size == 1 else _call(_AllToAll, x_TD, axis, send, receive)


def exchange(x: Tensor, axis: Axis) -> Tensor:
    """`Axis.exchange` of [P, ...]; backward exchanges the gradients."""
    return x if axis.size == 1 else _call(_Exchange, x, axis)


def _call(function: Any, *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out


def _gather_sequence(x_BSD: Tensor, axis: Axis) -> Tensor:
    P = axis.size
    B, S, D = x_BSD.shape
    return axis.all_gather(x_BSD).transpose(0, 1).reshape(B, P * S, D)


def _scatter_sequence(x_BSD: Tensor, axis: Axis) -> Tensor:
    P = axis.size
    B, S, D = x_BSD.shape
    return axis.reduce_scatter(x_BSD.view(B, P, S // P, D).transpose(0, 1))


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.layer = axis, axis.meter.layer
        return _gather_sequence(x_BSD, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with ctx.axis.meter.in_layer(ctx.layer):
            return _scatter_sequence(grad.contiguous(), ctx.axis), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.layer = axis, axis.meter.layer
        return _scatter_sequence(x_BSD, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with ctx.axis.meter.in_layer(ctx.layer):
            return _gather_sequence(grad, ctx.axis), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:
        ctx.axis, ctx.send, ctx.receive, ctx.layer = axis, send, receive, axis.meter.layer
        return axis.all_to_all(x_TD, send, receive)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with ctx.axis.meter.in_layer(ctx.layer):
            return ctx.axis.all_to_all(grad.contiguous(), ctx.receive, ctx.send), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.layer = axis, axis.meter.layer
        return axis.exchange(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with ctx.axis.meter.in_layer(ctx.layer):
            return ctx.axis.exchange(grad), None
