"""The element-wise part of SwiGLU (Shazeer 2020): silu(gate) * up."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.compiled import Compiler


def gated_function(compiled: Compiler, any_size: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """The implementation of `gated` to use: a compiled `gated` if compilation is on, else `gated_saving_inputs`."""
    return compiled(gated, any_size) if compiled.on else gated_saving_inputs


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gated_saving_inputs(gate: Tensor, up: Tensor) -> Tensor:
    """Like `gated`, but saves only its inputs for the backward pass and recomputes silu(gate), which autograd would
    save. Recomputing is faster."""
    out: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        d_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, F.silu(gate).mul_(grad)
