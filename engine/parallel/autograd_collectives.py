"""Collectives as autograd functions. The backward pass runs the adjoint collective, such as the reduce-scatter of an
all-gather, and the meter attributes it to the layer that ran the forward pass.

Shapes: B sequences, S tokens of a slice, D model width, P ranks of the axis. On an axis of size 1 each function returns
its input.
"""

from typing import Any

import torch
from torch import Tensor

from engine.parallel.collectives import AsyncCollective, Axis


def gather_sequence(x_BSD: Tensor, axis: Axis) -> Tensor:
    """Gather sequence slices into the whole sequence, [B, S, D] -> [B, P S, D]; backward reduce-scatters."""
    return x_BSD if axis.size == 1 else _call(_GatherSequence, x_BSD, axis)


def scatter_sequence(x_BSD: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter partial sums of the whole sequence into slices, [B, P S, D] -> [B, S, D]; backward all-gathers."""
    return x_BSD if axis.size == 1 else _call(_ScatterSequence, x_BSD, axis)


def all_to_all(x_TD: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
    """`Axis.all_to_all` with autograd: `send[p]` rows go to each rank p; backward sends the gradients of the rows
    back."""
    return x_TD if axis.size == 1 else _call(_AllToAll, x_TD, axis, send, receive)


def exchange(x: Tensor, axis: Axis) -> Tensor:
    """`Axis.exchange` of a tensor [P, ...] with autograd: backward exchanges the rows of the gradient."""
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


class OverlappedAllToAll:
    """An all-to-all with uneven splits (the number of rows may differ for each pair of ranks) that overlaps with what
    the caller computes between `start` and `wait`. In the backward pass, the all-to-all of the gradients overlaps with
    the backward of what ran between `start` and `wait`."""

    def __init__(self, axis: Axis, send: list[int], receive: list[int]):
        self.axis, self.send, self.receive, self.layer = axis, send, receive, axis.meter.layer
        self._running: tuple[AsyncCollective, Tensor] | None = None

    def start(self, x_TD: Tensor) -> Tensor:
        """Start the all-to-all. Returns rows that are not complete yet: pass them to `wait`, and do not use them in any
        other way."""
        return _call(_Start, x_TD, self)

    def wait(self, rows_RD: Tensor) -> Tensor:
        """Wait for the all-to-all, and return the complete rows."""
        return _call(_Wait, rows_RD, self)

    def run(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Start the all-to-all of the forward or the backward pass. The result is complete after `finish`, which also
        returns it."""
        with self.axis.meter.in_layer(self.layer):
            self._running = self.axis.start_all_to_all(x.contiguous(), send, receive)
        return self._running[1]

    def finish(self) -> Tensor:
        assert self._running is not None, "not started"
        started, rows = self._running
        with self.axis.meter.in_layer(self.layer):
            started.wait()
        self._running = None
        return rows


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, exchange: OverlappedAllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange.run(x_TD, exchange.send, exchange.receive)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.exchange.finish(), None  # started by `_Wait.backward`


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, exchange: OverlappedAllToAll) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return rows_RD.view_as(rows_RD)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        exchange: OverlappedAllToAll = ctx.exchange
        exchange.run(grad_RD, exchange.receive, exchange.send)
        # The first result only has the shape that autograd expects; `_Start.backward` returns the received gradient.
        return grad_RD, None
