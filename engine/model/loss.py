"""Cross-entropy with the vocabulary sharded over tp, computed in chunks of tokens.

The logits, in their original dtype, are the only tensor of their size that the loss keeps. Each chunk is converted to
fp32 when it is needed, and the backward pass overwrites the logits with their gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine.kernels.precision import at_least_fp32
from engine.model.moe.balancing_losses import attach_loss
from engine.parallel.collectives import Axis
from engine.planner.memory.sizes import LOSS_CHUNK


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor, tp: Axis) -> Tensor:
    """Sum over tokens of -log p(target), with the vocabulary sharded over tp. The sum is equal on all ranks of the tp
    axis.

    The tp ranks exchange three values per token instead of full logits. Targets below 0 are ignored. The backward pass
    overwrites the logits with their gradient, so it can run only once, and nothing else may use the logits afterwards.
    """
    return cross_entropies(logits_BSV, targets_BS, tp, 1).squeeze(0)


def cross_entropies(logits_BSV: Tensor, targets_BS: Tensor, tp: Axis, parts: int) -> Tensor:
    """Split the sequences into `parts` equal parts and return the `cross_entropy` of each part, [parts]."""
    losses: Tensor = _CrossEntropy.apply(logits_BSV, targets_BS, tp, parts)  # type: ignore[no-untyped-call]
    return losses


def training_loss(logits_BSV: Tensor, targets: Tensor, tp: Axis, scale: float, mtp_weight: float) -> Tensor:
    """`scale` times the sum of the next-token cross-entropies; `targets`, [B, S], contains the next tokens.

    With P multi-token prediction layers, `targets` are [B, 1 + P, S] and the logits [(1 + P) B, S, V/tp]. The loss of
    the multi-token prediction layers is `mtp_weight` times the mean of their cross-entropies (DeepSeek-V3, arXiv
    2412.19437, eq. 24 and 25). The backward pass adds the gradient of this loss, but the returned value does not
    include it.
    """
    if targets.ndim == 2:
        return cross_entropy(logits_BSV, targets, tp) * scale
    parts = targets.shape[1]
    main, *further = cross_entropies(logits_BSV, targets.transpose(0, 1), tp, parts).unbind()
    loss = attach_loss(main * scale, torch.stack(further).mean(), mtp_weight * scale)
    return loss.clone()  # attach_loss returns a view, which split-backward schedules cannot detach


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, targets_BS: Tensor, tp: Axis, parts: int) -> Tensor:
        logits_TV, targets_T = logits_BSV.flatten(0, -2), targets_BS.flatten()
        rows = logits_TV.shape[-1]
        local_T = targets_T - tp.rank * rows
        owned_T = (local_T >= 0) & (local_T < rows)
        index_T1 = local_T.masked_fill(~owned_T, 0).unsqueeze(-1)
        # For each token: highest logit, sum of exp(logit - highest), logit of the target.
        mine_3T = at_least_fp32(logits_TV.new_empty(0)).new_empty(3, len(targets_T))
        for tokens in _chunks(logits_TV):
            chunk = at_least_fp32(logits_TV[tokens])
            top = torch.amax(chunk, -1, out=mine_3T[0, tokens])
            mine_3T[2, tokens] = chunk.gather(-1, index_T1[tokens]).squeeze(-1)
            torch.sum((chunk - top.unsqueeze(-1)).exp_(), -1, out=mine_3T[1, tokens])
        mine_3T[2].masked_fill_(~owned_T, 0.0)
        tops, totals, hits = tp.all_gather(mine_3T).unbind(1)
        highest_T = tops.amax(0)
        log_sum_exp_T = (totals * (tops - highest_T).exp()).sum(0).log() + highest_T
        valid_T = targets_T >= 0
        losses_T = (log_sum_exp_T - hits.sum(0)).masked_fill(~valid_T, 0.0)
        ctx.save_for_backward(logits_BSV, log_sum_exp_T, index_T1, owned_T, valid_T.view(parts, -1))
        ctx.overwritten = False
        return losses_T.view(parts, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        assert not ctx.overwritten, "the first backward has overwritten the logits"
        ctx.overwritten = True
        logits_BSV, log_sum_exp_T, index_T1, owned_T, valid_PT = ctx.saved_tensors
        logits_TV = logits_BSV.detach().flatten(0, -2)
        weight_T = (grad.unsqueeze(1) * valid_PT).flatten()
        for tokens in _chunks(logits_TV):
            chunk = logits_TV[tokens]
            probs = at_least_fp32(chunk)  # the logits themselves, if they are fp32
            probs.sub_(log_sum_exp_T[tokens].unsqueeze(-1)).exp_()
            weight = weight_T[tokens]
            probs.mul_(weight.unsqueeze(-1))
            probs.scatter_add_(-1, index_T1[tokens], -(weight * owned_T[tokens]).unsqueeze(-1))
            if probs.dtype != chunk.dtype:
                chunk.copy_(probs)
        return logits_TV.view_as(logits_BSV), None, None, None


def _chunks(logits_TV: Tensor) -> Iterator[slice]:
    """Slices of tokens, each with at most LOSS_CHUNK logits, but with at least one token."""
    tokens, vocabulary = logits_TV.shape
    size = max(1, LOSS_CHUNK // vocabulary)
    return (slice(start, start + size) for start in range(0, tokens, size))
