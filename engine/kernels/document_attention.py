"""Causal attention within documents: a query attends only to its own key and to earlier keys of the same document.

On a CPU an additive Q x K mask marks the visible keys; it is made once per micro-batch and shared by all layers. On a
GPU a block mask of flex attention (Dong et al. 2024, arXiv 2412.05496) is used, which skips hidden blocks and needs no
Q x K mask.

Shapes: B sequences, H query heads, G KV heads (G divides H), Q queries, K keys, S tokens of a whole sequence, N and M
blocks of queries and keys, C head dimension of queries and keys, V head dimension of values.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from engine.kernels.flash_attention import of_equal_width

BLOCK = 128  # queries and keys in a block of flex attention

Mask = Tensor | BlockMask
"""The numbers to add to the scores, [B, 1, Q, K], or the visible blocks of flex attention."""


@dataclass(frozen=True)
class Positions:
    """Sequence positions of the queries [Q] and of the keys [K], both ascending, and the position where the document of
    each query starts [B, Q]. `window` is the maximum number of keys that a query attends to."""

    queries: Tensor
    keys: Tensor
    starts: Tensor
    window: int | None = None

    def first_keys(self) -> Tensor:
        """The first position that each query attends to, [B, Q]; never decreases from one query to the next."""
        if self.window is None:
            return self.starts
        return torch.maximum(self.starts, self.queries - (self.window - 1))


def mask_of(positions: Positions, dtype: torch.dtype) -> Mask:
    """The mask for queries of `dtype`, on the device of `positions`."""
    if positions.keys.device.type == "cpu":
        return added_to_scores(positions, dtype)
    return visible_blocks(positions)


def added_to_scores(positions: Positions, dtype: torch.dtype) -> Tensor:
    """The mask as numbers to add to the scores, [B, 1, Q, K]: 0 where a query attends to a key, else a large negative
    value that gives the key no weight. The value is finite because in one block of a ring all keys may be hidden from a
    query, and a softmax over only -inf is NaN.
    """
    first_BQ1 = positions.first_keys().unsqueeze(-1)
    hidden = (positions.keys < first_BQ1) | (positions.keys > positions.queries.unsqueeze(-1))
    low = torch.finfo(dtype).min / 2
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, low).unsqueeze(1)


def visible_blocks(positions: Positions) -> BlockMask:
    """The block mask of flex attention, computed from the first and last position of each block, without waiting for
    the device and without a Q x K mask. The mask may contain blocks in which no query attends to a key; such blocks
    cost time but do not change the result."""
    first_BQ, queries, keys = positions.first_keys(), positions.queries, positions.keys
    q_low, q_high = (_edge(queries, last).unsqueeze(-1) for last in (False, True))
    k_low, k_high = _edge(keys, last=False), _edge(keys, last=True)
    first_low, first_high = (_edge(first_BQ, last).unsqueeze(-1) for last in (False, True))
    visible_BNM = (k_high >= first_low) & (k_low <= q_high)
    full_BNM = (k_low >= first_high) & (k_high <= q_low) & _complete(queries).unsqueeze(-1) & _complete(keys)

    def within_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (keys[k] >= first_BQ[b, q]) & (keys[k] <= queries[q])

    return BlockMask.from_kv_blocks(
        *_listed(visible_BNM & ~full_BNM),
        *_listed(full_BNM),
        BLOCK_SIZE=BLOCK,
        mask_mod=within_document,
        seq_lengths=(len(queries), len(keys)),
    )


def attention(q_BHQC: Tensor, k_BGKC: Tensor, v_BGKV: Tensor, mask: Mask) -> Tensor:
    """Masked attention, [B, H, Q, V]; every query attends to at least one key."""
    return _attend(q_BHQC, k_BGKC, v_BGKV, mask)[0]


def forward(q_BHQC: Tensor, k_BGKC: Tensor, v_BGKV: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Like `flash_attention.forward`, but with a mask. If a query has no visible keys, its log-sum-exp is so low that
    its output has no weight in a merge."""
    with torch.no_grad():
        return _attend(q_BHQC, k_BGKC, v_BGKV, mask)


def backward(
    grad: Tensor, q_BHQC: Tensor, k_BGKC: Tensor, v_BGKV: Tensor, out: Tensor, lse: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `flash_attention.backward`, but with a mask: this block's contribution to the gradients of q, k and v, given
    the output and log-sum-exp over all blocks."""
    if isinstance(mask, BlockMask):
        return _flex_backward(grad, q_BHQC, k_BGKC, v_BGKV, out, lse, mask)
    C, V = q_BHQC.shape[-1], v_BGKV.shape[-1]
    q, k, v, out, grad = of_equal_width(q_BHQC, k_BGKC, v_BGKV, out, grad)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    d_q, d_k, d_v = kernel(grad, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=C**-0.5)
    return d_q[..., :C], d_k[..., :C], d_v[..., :V]


def _attend(q_BHQC: Tensor, k_BGKC: Tensor, v_BGKV: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Attention with a mask: returns the output and the log-sum-exp."""
    if isinstance(mask, BlockMask):
        return _flex(q_BHQC, k_BGKC, v_BGKV, mask)
    V, scale = v_BGKV.shape[-1], q_BHQC.shape[-1] ** -0.5
    q, k, v = of_equal_width(q_BHQC, k_BGKC, v_BGKV)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out[..., :V], lse


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    run = _compiled() if q.device.type == "cuda" else flex_attention
    out, aux = run(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@cache
def _compiled() -> Any:
    """flex attention, compiled, because without compilation it computes the full Q x K scores."""
    return torch.compile(flex_attention, dynamic=False)


def _flex_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward pass of one block, given the output and log-sum-exp over all blocks. flex attention has no backward pass
    for this case, so the block's forward pass is recomputed. Each block has an output o, a log-sum-exp l and a weight w
    = exp(l - lse); out is the sum of w * o over blocks. So the gradient of o is w * grad, and the gradient of l is w *
    sum(grad * (o - out))."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        o, own = _flex(q, k, v, mask)
    w = (own.detach() - lse).exp()
    grad_l = w * (grad * (o.detach() - out)).sum(-1)
    d_q, d_k, d_v = torch.autograd.grad((o, own), (q, k, v), (w.unsqueeze(-1).to(o.dtype) * grad, grad_l))
    return d_q, d_k, d_v


def _edge(x: Tensor, last: bool) -> Tensor:
    """The first or last value of each block along the last dimension of `x`. An incomplete last block is padded with
    the last value of `x`."""
    whole = -(-x.shape[-1] // BLOCK) * BLOCK - x.shape[-1]
    blocks = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], whole)), -1) if whole else x
    return blocks[..., (BLOCK - 1 if last else 0) :: BLOCK]


def _complete(x: Tensor) -> Tensor:
    """For each block, whether it is full, that is, contains no padding."""
    return torch.arange(-(-len(x) // BLOCK), device=x.device) < len(x) // BLOCK


def _listed(blocks_BNM: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, for each query block, the number of key blocks selected by `blocks_BNM` ([B, 1, N]), and the indices of
    all key blocks, with those of the selected blocks first ([B, 1, N, M])."""
    chosen = blocks_BNM.unsqueeze(1).to(torch.int32)
    order = chosen.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return chosen.sum(-1, dtype=torch.int32), order.contiguous()
