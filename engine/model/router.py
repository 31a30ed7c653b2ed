"""The router: which experts take which tokens, with what weight, and the losses that keep experts evenly loaded.

Everything about a sequence is counted over the whole sequence, also when its slices lie on several ranks, so choices,
drops, losses and gradients are the same in every layout.

Shapes: B sequences, S tokens of this rank's slice, T = B S, D model, E experts, K top-k.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.layout import Moe
from engine.model.dials import Dials
from engine.parallel.tensor import Weights, at_least_fp32


@dataclass(frozen=True)
class Choice:
    """What became of one micro-batch's tokens. Made once; a recomputed forward uses it again."""

    experts_TK: Tensor
    keep_TK: Tensor | None  # pairs within capacity; None = all
    load_E: Tensor  # pairs routed from this rank's tokens, dropped ones too
    share_BE: Tensor  # fraction of a whole sequence's pairs that chose each expert, over all its slices

    @property
    def dropped(self) -> Tensor:
        """The number of this rank's pairs over capacity."""
        if self.keep_TK is None:
            return torch.zeros((), dtype=torch.int64, device=self.experts_TK.device)
        return (~self.keep_TK).sum()


class Router(nn.Module):
    """Top-k token choice (Shazeer et al. 2017): `forward` scores, `choose` decides, `weigh` and `balanced` go on."""

    def __init__(self, weights: Weights, name: str, moe: Moe, d_model: int, dials: Dials):
        super().__init__()
        self.moe, self.dials, self.slices = moe, dials, weights.slices
        self.weight = weights.replicated(name, (moe.experts, d_model), 0.02)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Each token's probabilities over the experts, [B, S, E]."""
        return F.linear(at_least_fp32(x_BSD), at_least_fp32(self.weight)).softmax(-1)

    @torch.no_grad()
    def choose(self, probs_BSE: Tensor) -> Choice:
        B, S, E = probs_BSE.shape
        K = self.moe.top_k
        top_BSK = probs_BSE.topk(K, -1).indices
        chosen_BSE = torch.zeros(B, S, E, dtype=torch.int32, device=probs_BSE.device)
        chosen_BSE.scatter_(-1, top_BSK, 1)
        place_BSE, total_BE = self.slices.queue(chosen_BSE)
        whole = S * self.slices.count
        keep_TK = None
        if self.dials.capacity_factor is not None:
            capacity = math.ceil(self.dials.capacity_factor * whole * K / E)
            keep_TK = (place_BSE.gather(-1, top_BSK) < capacity).flatten(0, 1)
        return Choice(top_BSK.flatten(0, 1), keep_TK, chosen_BSE.sum((0, 1)), total_BE / (whole * K))

    def weigh(self, probs_BSE: Tensor, choice: Choice) -> Tensor:
        """The share of each chosen expert in its token's output, [T, K]."""
        top_TK = probs_BSE.flatten(0, 1).gather(1, choice.experts_TK)
        if self.moe.top_k == 1:  # p / p would be 1, and a top-1 router would learn nothing from the loss
            return top_TK
        return top_TK / top_TK.sum(-1, keepdim=True)

    def balanced(self, out_TD: Tensor, probs_BSE: Tensor, choice: Choice) -> Tensor:
        """`out_TD` itself, with the balancing loss of its sequences (Fedus et al. 2022) joined to what is minimised."""
        if self.moe.balance != "aux":
            return out_TD
        mean_BE = probs_BSE.sum(1) / (probs_BSE.shape[1] * self.slices.count)
        aux = self.moe.experts * (choice.share_BE * mean_BE).sum()
        return _with_loss(out_TD, aux, self.dials.aux_loss_coef * self.dials.aux_scale)


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
