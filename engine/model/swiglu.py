"""What SwiGLU has between its matrices (Shazeer 2020): silu(gate) * up."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.compiled import Compiler


def gated_by(compiled: Compiler, any_size: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """`gated` compiled, or the one with a backward of its own."""
    return compiled(gated, any_size) if compiled.on else own_gated


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def own_gated(gate: Tensor, up: Tensor) -> Tensor:
    """Keeps its inputs alone. Autograd keeps silu(gate) too, which takes longer to write and read than to compute."""
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
