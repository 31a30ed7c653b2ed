"""Cross-entropy with the vocabulary sharded over tp."""

from typing import Any

import torch
from torch import Tensor

from engine.kernels.precision import at_least_fp32
from engine.parallel.collectives import Axis


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor, tp: Axis) -> Tensor:
    """Sum over tokens of -log p(target), with the vocabulary sharded over tp. The sum is equal on all ranks of the tp
    axis.

    These ranks exchange three numbers per token instead of full logits. Targets below 0 are ignored.
    """
    loss: Tensor = _CrossEntropy.apply(logits_BSV, targets_BS, tp)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, targets_BS: Tensor, tp: Axis) -> Tensor:
        logits = at_least_fp32(logits_BSV)
        rows = logits.shape[-1]
        local_BS = targets_BS - tp.rank * rows
        owned = (local_BS >= 0) & (local_BS < rows)
        index = local_BS.masked_fill(~owned, 0).unsqueeze(-1)
        top = logits.amax(-1)
        scaled = (logits - top.unsqueeze(-1)).exp_()
        total = scaled.sum(-1)
        target = logits.gather(-1, index).squeeze(-1).masked_fill(~owned, 0.0)
        tops, totals, hits = tp.all_gather(torch.stack((top, total, target))).unbind(1)
        highest = tops.amax(0)
        sum_exp = (totals * (tops - highest).exp()).sum(0)
        valid = targets_BS >= 0
        losses = (sum_exp.log() + highest - hits.sum(0)).masked_fill(~valid, 0.0)
        ctx.save_for_backward(scaled, (top - highest).exp() / sum_exp, index, owned, valid)
        ctx.dtype = logits_BSV.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scaled, to_probs, index, owned, valid = ctx.saved_tensors
        grads_BS = grad * valid
        d_logits = scaled * (to_probs * grads_BS).unsqueeze(-1)
        d_logits.scatter_add_(-1, index, -(grads_BS * owned).unsqueeze(-1))
        return d_logits.to(ctx.dtype), None, None
