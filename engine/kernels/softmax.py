"""Softmax over a short last dim. If a row is shorter than a vector register, torch's CPU kernel processes it one
element at a time, which takes five times as long as separate operations."""

from typing import Any

import torch
from torch import Tensor

SHORT = 16
"""Elements of the shortest row for which torch's kernel is faster: fp32 numbers in a register of 512 bits."""


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dim."""
    if x.shape[-1] >= SHORT or x.device.type != "cpu" or torch.compiler.is_compiling():
        return x.softmax(-1)
    out: Tensor = _Softmax.apply(x)  # type: ignore[no-untyped-call]
    return out


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        powers = (x - x.amax(-1, keepdim=True)).exp_()
        out = powers.div_(powers.sum(-1, keepdim=True))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        return (grad - torch.linalg.vecdot(grad, out).unsqueeze(-1)).mul_(out)
