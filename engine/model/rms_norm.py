"""RMSNorm. On the CPU it uses a custom forward and backward, because torch has no fused CPU kernel and torch's version
takes twice as long."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.kernels.precision import at_least_fp32
from engine.parallel.parameters import ParameterFactory


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019)."""

    def __init__(self, factory: ParameterFactory, d_model: int, eps: float):
        super().__init__()
        self.weight = factory.ones((d_model,))
        self.eps = eps
        self._norm = factory.compiled(rms_norm) if factory.compiled.on else _rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.device.type != "cpu":
        return rms_norm(x, weight, eps)
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    """y = u w with u = x r, r = (mean(x^2) + eps)^-1/2; dx = r (g w - u mean(g w u)), dw = sum(g u)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = at_least_fp32(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = (wide * scale).to(x.dtype)
        ctx.save_for_backward(unit, scale, weight)
        out: Tensor = unit * weight
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        unit, scale, weight = ctx.saved_tensors
        by_unit = grad * unit
        mean = (by_unit @ weight).unsqueeze_(-1).div_(-unit.shape[-1])
        d_x = (grad * weight).addcmul_(unit, mean).mul_(scale.to(grad.dtype))
        return d_x, by_unit.flatten(0, -2).sum(0), None
