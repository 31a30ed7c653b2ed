"""Ulysses attention (Jacobs et al. 2023): after an all-to-all, each cp rank holds all tokens of the sequences for a
part of the heads.

Each rank computes attention for its heads. A second all-to-all sends the outputs back to the ranks that hold the
tokens.

Shapes: B sequences, H query heads and G key heads of this tp rank, S tokens of this cp rank, W = P S tokens of a whole
sequence, C head dimension of queries and keys, V head dimension of values, P = cp.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels import document_attention
from engine.kernels.document_attention import Mask
from engine.kernels.window_attention import window_attention
from engine.parallel.autograd_collectives import exchange
from engine.parallel.collectives import Axis


def ulysses_attention(
    q_BHSC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    cp: Axis,
    window: int | None = None,
    masks: Sequence[Mask] | None = None,
) -> Tensor:
    """Attention over whole sequences, [B, H, S, V]: causal, or under the single mask in `masks`. P must divide H, and
    either P divides G or G divides P. If G < P, each key head is sent to all ranks that need it."""
    P, G = cp.size, k_BGSC.shape[1]
    if G < P:
        k_BGSC, v_BGSC = (x.repeat_interleave(P // G, 1) for x in (k_BGSC, v_BGSC))
    shares = [x.view(x.shape[0], P, -1, *x.shape[2:]) for x in (q_BHSC, k_BGSC, v_BGSC)]
    # One exchange sends all three, concatenated along the heads. Values of another width (latent attention, where G =
    # H) are concatenated with queries and keys along the width.
    dim = 2 if k_BGSC.shape[-1] == v_BGSC.shape[-1] else 4
    sizes = [share.shape[dim] for share in shares]
    whole = _in_order(exchange(torch.cat(shares, dim).transpose(0, 1), cp))
    q_BHWC, k_BGWC, v_BGWC = torch.split(whole, sizes, dim - 1)
    if masks:
        out_BHWC = document_attention.attention(q_BHWC, k_BGWC, v_BGWC, masks[0])
    else:
        out_BHWC = window_attention(q_BHWC, k_BGWC, v_BGWC, window)
    return exchange(_in_slices(out_BHWC, P), cp).transpose(0, 1).flatten(1, 2)


def _in_order(x_PBHSC: Tensor) -> Tensor:
    """Put the tokens of all cp ranks, two chunks per rank (zigzag split), in the order of the whole sequences. The
    result is [B, H, W, C], where H counts heads, W is the length of a whole sequence and C is the head dimension."""
    first, second = x_PBHSC.chunk(2, 3)
    return torch.cat((first, second.flip(0))).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _in_slices(x_BHWC: Tensor, P: int) -> Tensor:
    """The inverse of `_in_order`."""
    chunks = torch.stack(x_BHWC.chunk(2 * P, 2))
    return torch.cat((chunks[:P], chunks[P:].flip(0)), 3)
