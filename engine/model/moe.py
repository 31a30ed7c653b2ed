"""Mixture of experts: top-k token choice, per-sequence balancing loss and capacity, experts as one grouped GEMM.

Everything about a sequence is counted over the whole sequence, also when its slices lie on several tensor ranks, so
loss, drops and gradients are the same in every layout.

Shapes: B sequences, S tokens of this rank's slice, T = B S, D model, F expert width, E experts, K top-k.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.layout import Moe
from engine.meter import Meter
from engine.parallel.experts import Dispatch, plan_dispatch
from engine.parallel.tensor import Weights, at_least_fp32, local


@dataclass
class Dials:
    """What a step reads afresh each time; the knobs turn these between steps."""

    recompute: str = "none"
    capacity_factor: float | None = None  # None = dropless
    aux_loss_coef: float = 0.0
    aux_scale: float = 1.0  # 1 / sequences of the global batch
    lr_scale: float = 1.0


@dataclass(frozen=True)
class Routing:
    """One micro-batch's decisions at one layer. Made once; a recomputed forward uses them again."""

    top_TK: Tensor
    share_BE: Tensor  # fraction of a whole sequence's pairs that chose each expert, over all its slices
    dispatch: Dispatch


class Experts(nn.Module):
    """This rank's SwiGLU experts, stacked: rows [R, D] sorted by expert -> [R, D]."""

    def __init__(self, weights: Weights, name: str, moe: Moe, d_model: int, out_std: float):
        super().__init__()
        self.gate = weights.experts(f"{name}.gate", moe.experts, (d_model, moe.d_expert), 0.02)
        self.up = weights.experts(f"{name}.up", moe.experts, (d_model, moe.d_expert), 0.02)
        self.down = weights.experts(f"{name}.down", moe.experts, (moe.d_expert, d_model), out_std)

    def forward(self, rows_RD: Tensor, offsets: Tensor) -> Tensor:
        gate = grouped(rows_RD, local(self.gate), offsets)
        up = grouped(rows_RD, local(self.up), offsets)
        return grouped(F.silu(gate) * up, local(self.down), offsets)


def grouped(rows_RX: Tensor, weights_EXY: Tensor, offsets: Tensor) -> Tensor:
    """Rows up to each offset times that expert's matrix, [R, Y]."""
    if rows_RX.dtype == torch.float64:  # which torch's kernel does not know, and exact parity tests need
        parts = rows_RX.tensor_split(offsets[:-1].cpu().long())
        return torch.cat([part @ weight for part, weight in zip(parts, weights_EXY, strict=True)])
    return F.grouped_mm(rows_RX, weights_EXY, offs=offsets)


class MoeLayer(nn.Module):
    """Router and experts of one layer: this rank's slice [B, S, D] -> [B, S, D]."""

    def __init__(
        self, weights: Weights, layer: int, moe: Moe, d_model: int, out_std: float, dials: Dials, meter: Meter
    ):
        super().__init__()
        self.layer, self.moe, self.dials, self.meter = layer, moe, dials, meter
        self.slices, self.ep = weights.slices, weights.ep
        self.router = weights.replicated(f"layers.{layer}.router", (moe.experts, d_model), 0.02)
        self.experts = Experts(weights, f"layers.{layer}.experts", moe, d_model, out_std)

    def forward(self, x_BSD: Tensor, memo: dict[str, Routing]) -> Tensor:
        """`memo` is empty on a first forward and holds its decisions on a recomputed one."""
        B, S, D = x_BSD.shape
        x_TD = x_BSD.reshape(B * S, D)
        probs_TE = F.linear(at_least_fp32(x_TD), at_least_fp32(self.router)).softmax(-1)
        if "routing" not in memo:
            memo["routing"] = self._decide(probs_TE.detach().view(B, S, -1))
        routing = memo["routing"]
        top = probs_TE.gather(1, routing.top_TK)
        if self.moe.top_k > 1:  # p / p would be 1, and a top-1 router would learn nothing from the loss
            top = top / top.sum(-1, keepdim=True)
        outputs_ND = routing.dispatch.run(x_TD, self.experts)
        weighted = outputs_ND * top.flatten()[routing.dispatch.pairs_N].unsqueeze(-1).to(x_TD.dtype)
        out_TD = torch.zeros_like(x_TD).index_add(0, routing.dispatch.tokens_N, weighted)
        if self.moe.balance == "aux":
            mean_BE = probs_TE.view(B, S, -1).sum(1) / (S * self.slices.count)
            aux = self.moe.experts * (routing.share_BE * mean_BE).sum()
            scale = self.dials.aux_loss_coef * self.dials.aux_scale
            out_TD = _with_loss(out_TD, aux, scale)
        return out_TD.view(B, S, D)

    @torch.no_grad()
    def _decide(self, probs_BSE: Tensor) -> Routing:
        B, S, E = probs_BSE.shape
        K = self.moe.top_k
        top_BSK = probs_BSE.topk(K, -1).indices
        chosen_BSE = torch.zeros(B, S, E, dtype=torch.int32, device=probs_BSE.device)
        chosen_BSE.scatter_(-1, top_BSK, 1)
        place_BSE, total_BE = self.slices.queue(chosen_BSE)
        whole = S * self.slices.count
        keep_TK = None
        load_E = chosen_BSE.sum((0, 1))
        dropped = torch.zeros((), dtype=torch.int64)
        if self.dials.capacity_factor is not None:
            capacity = math.ceil(self.dials.capacity_factor * whole * K / E)
            keep_TK = (place_BSE.gather(-1, top_BSK) < capacity).view(B * S, K)
            dropped = (~keep_TK).sum()
        self.meter.routed(self.layer, load_E, dropped)
        share_BE = total_BE / (whole * K)
        top_TK = top_BSK.view(B * S, K)
        return Routing(top_TK, share_BE, plan_dispatch(top_TK, keep_TK, E, self.ep))


def _with_loss(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    out: Tensor = _WithLoss.apply(x, loss, scale)  # type: ignore[no-untyped-call]
    return out


class _WithLoss(torch.autograd.Function):
    """The identity on `x`, through which `scale * loss` joins what is minimised but not what is reported."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.full_like(ctx.like, ctx.scale), None
