"""Ulysses attention (Jacobs et al. 2023): one all-to-all trades tokens for heads, a second one trades back.

Between the two, each cp rank holds the whole sequence of its share of the heads.

Shapes: B sequences, H query heads and G key heads of this tensor rank, S tokens of this cp rank, W = P S tokens of a
whole sequence, C head width, P = cp.
"""

import torch
from torch import Tensor

from engine.kernels.flash_attention import causal_attention
from engine.parallel.autograd_collectives import exchange
from engine.parallel.collectives import Axis


def ulysses_attention(q_BHSC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, cp: Axis) -> Tensor:
    """P divides H. Key heads fewer than P are sent to each rank that needs them, so P and G divide one another."""
    P, (B, _, S, C), G = cp.size, q_BHSC.shape, k_BGSC.shape[1]
    if G < P:
        k_BGSC, v_BGSC = (x.repeat_interleave(P // G, 1) for x in (k_BGSC, v_BGSC))
    shares = [x.view(B, P, -1, S, C) for x in (q_BHSC, k_BGSC, v_BGSC)]
    widths = [share.shape[2] for share in shares]
    whole = _in_order(exchange(torch.cat(shares, 2).transpose(0, 1), cp))
    q_BHWC, k_BGWC, v_BGWC = torch.split(whole, widths, 1)
    out_BHWC = causal_attention(q_BHWC, k_BGWC, v_BGWC)
    return exchange(_in_slices(out_BHWC, P), cp).transpose(0, 1).flatten(1, 2)


def _in_order(x_PBHSC: Tensor) -> Tensor:
    """Each rank's head and tail as whole sequences, [B, H, W, C]."""
    head, tail = x_PBHSC.chunk(2, 3)
    return torch.cat((head, tail.flip(0))).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _in_slices(x_BHWC: Tensor, P: int) -> Tensor:
    """The inverse of `_in_order`."""
    chunks = torch.stack(x_BHWC.chunk(2 * P, 2))
    return torch.cat((chunks[:P], chunks[P:].flip(0)), 3)
