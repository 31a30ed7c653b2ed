"""What keeps experts evenly loaded and logits small: losses on the router's scores, and a bias on its choice.

The losses change the router, and through the tokens that it reads all layers before it; the bias has no gradient.

Shapes: B sequences, S tokens of this rank's slice, W tokens of a whole sequence, E experts.
"""

from typing import Any

import torch
from torch import Tensor


def sequence_balance(scores_BSE: Tensor, share_BE: Tensor, whole: int) -> Tensor:
    """E sum_e f_e P_e, summed over sequences: this slice's part of it.

    f_e is the share of a sequence's W = `whole` tokens' choices that fell on e, P_e its tokens' mean probability of e
    (Fedus et al. 2022, eq. 4; within a sequence and with scores made probabilities, DeepSeek-V3 2024, eq. 17-20). 1 for
    a sequence in balance.
    """
    probs_BSE = scores_BSE / scores_BSE.sum(-1, keepdim=True)
    return share_BE.shape[-1] * (share_BE * probs_BSE.sum(1) / whole).sum()


def z_loss(logits_BSE: Tensor, whole: int) -> Tensor:
    """Mean over a sequence's `whole` tokens of log^2 sum_e exp(logit_e), summed over sequences: this slice's part.

    It keeps the router's logits small (Zoph et al. 2022, eq. 5).
    """
    return logits_BSE.logsumexp(-1).square().sum() / whole


def updated_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """A bias after a step: `rate` up where fewer pairs than the mean chose the expert, down where more did (Wang et al.
    2024, algorithm 1). `load_E` are whole numbers, so every layout nudges alike."""
    return bias_E + rate * (load_E.sum() - load_E * len(load_E)).sign().to(bias_E.dtype)


def attach_loss(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    """The identity on `x`, through which `scale * loss` joins what is minimised but not what is reported."""
    out: Tensor = _WithLoss.apply(x, loss, scale)  # type: ignore[no-untyped-call]
    return out


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.full_like(ctx.like, ctx.scale), None
