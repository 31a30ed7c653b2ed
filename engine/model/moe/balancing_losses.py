"""Load balancing of experts: auxiliary loss, z-loss, and the bias of loss-free balancing.

The gradients of the losses flow to the router and, through the router's input, to all earlier layers. The bias has no
gradient.

Shapes: B sequences, S tokens of this rank's slice, W tokens of a whole sequence, E experts.
"""

from typing import Any

import torch
from torch import Tensor


def sequence_balance(scores_BSE: Tensor, share_BE: Tensor, whole: int) -> Tensor:
    """The part of the auxiliary loss E sum_e f_e P_e that comes from this rank's slice, summed over sequences.

    For a sequence of `whole` tokens, each of which chooses K experts, f_e is the fraction of these choices that pick
    expert e, and P_e is the mean probability of e over the tokens (Fedus et al. 2022, eq. 4; per sequence and with
    normalised scores, DeepSeek-V3 2024, eq. 17-20). The loss of a balanced sequence is 1.
    """
    probs_BSE = scores_BSE / scores_BSE.sum(-1, keepdim=True)
    return share_BE.shape[-1] * (share_BE * probs_BSE.sum(1) / whole).sum()


def z_loss(logits_BSE: Tensor, whole: int) -> Tensor:
    """This rank's share of the z-loss: log^2 sum_e exp(logit_e), summed over the tokens of its slice and over
    sequences, divided by the number `whole` of tokens in a sequence. The z-loss keeps the router's logits small (Zoph
    et al. 2022, eq. 5).
    """
    return logits_BSE.logsumexp(-1).square().sum() / whole


def updated_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """The bias after a step: `rate` is added for experts below the mean load and subtracted for experts above it (Wang
    et al. 2024, algorithm 1). `load_E` contains integers, so the result is the same in every layout."""
    return bias_E + rate * (load_E.sum() - load_E * len(load_E)).sign().to(bias_E.dtype)


def attach_loss(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    """Return `x` unchanged; backward adds the gradient of `scale * loss`. The reported loss does not include this
    term."""
    out: Tensor = _AttachLoss.apply(x, loss, scale)  # type: ignore[no-untyped-call]
    return out


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.full_like(ctx.like, ctx.scale), None
