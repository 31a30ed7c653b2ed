"""Causal attention in a sliding window: each query attends to the last W keys, including its own (Mistral 7B, arXiv
2310.06825).

Queries are divided into blocks of W. The queries of a block attend to the block's own keys and to the keys of the
previous block. So each query needs 2 W scores instead of S, and no S x S mask is built.

Shapes: B sequences, H query heads, G KV heads (G divides H), S tokens, W window, N blocks after the first, K = 2 W keys
of a block, C head dimension.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.flash_attention import causal_attention, for_each_query_head


def window_attention(q_BHSC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, window: int | None) -> Tensor:
    """Causal attention in which each query attends to at most the last `window` keys (None: no limit), [B, H, S, C]."""
    W, S = window, q_BHSC.shape[2]
    if W is None or W >= S:
        return causal_attention(q_BHSC, k_BGSC, v_BGSC)
    first = causal_attention(*(x[:, :, :W] for x in (q_BHSC, k_BGSC, v_BGSC)))
    blocks = -(-S // W) - 1
    # The padding is after every query, so the causal mask excludes it.
    k, v = (F.pad(for_each_query_head(x, q_BHSC), (0, 0, 0, (blocks + 1) * W - S)) for x in (k_BGSC, v_BGSC))
    q = F.pad(q_BHSC[:, :, W:], (0, 0, 0, (blocks + 1) * W - S))
    q_BHNWC = q.unflatten(2, (blocks, W))  # type: ignore[no-untyped-call]
    k_BHNKC, v_BHNKC = (x.unfold(2, 2 * W, W).transpose(-1, -2) for x in (k, v))
    # Query i of a block is at position W + i of its 2 W keys.
    query, key = torch.arange(W, device=q.device)[:, None], torch.arange(2 * W, device=q.device)
    visible = (key > query) & (key <= query + W)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHNWC, k_BHNKC, v_BHNKC))
    rest = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    rest_BHSC = rest.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)  # type: ignore[no-untyped-call]
    return torch.cat((first, rest_BHSC[:, :, : S - W]), 2)
