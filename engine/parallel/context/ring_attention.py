"""Ring attention (Liu et al. 2023): queries stay on their rank, keys and values are sent around the ring of cp ranks.

Parts of the scores that the causal mask hides completely are not computed.

Shapes: B sequences, H query heads and G key heads of this tp rank, S tokens of this cp rank, C head dimension of
queries and keys, V head dimension of values. Keys and values are sent together, C + V elements per token and head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels import document_attention, flash_attention
from engine.kernels.document_attention import Mask
from engine.parallel.collectives import AsyncCollective, Axis


@dataclass(frozen=True)
class VisibleBlock:
    """A slice of one rank's queries, and the slice of the keys of one rank (the owner) to which these queries attend
    under the causal mask."""

    queries: slice
    keys: slice
    causal: bool


def visible_block(rank: int, owner: int, S: int) -> VisibleBlock:
    """The visible part of the S x S scores of `rank`'s queries and `owner`'s keys. With the zigzag split, each rank has
    two chunks, and half of the scores are visible, whichever rank is the owner."""
    if owner == rank:
        return VisibleBlock(slice(0, S), slice(0, S), causal=True)
    if owner < rank:  # the owner's first chunk is before both chunks of `rank`, its second chunk after both
        return VisibleBlock(slice(0, S), slice(0, S // 2), causal=False)
    # Both chunks of the owner are between the two chunks of `rank`.
    return VisibleBlock(slice(S // 2, S), slice(0, S), causal=False)


def ring_attention(
    q_BHSC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    cp: Axis,
    window: int | None = None,
    masks: Sequence[Mask] | None = None,
) -> Tensor:
    """Returns the attention output, [B, H, S, V]. Attention is causal, or follows `masks`: one mask for each visible
    block, in the order of the hops."""
    assert window is None, "the checks of a layout refuse windows over a ring"
    out: Tensor = _Ring.apply(q_BHSC, k_BGSC, v_BGSC, cp, masks)  # type: ignore[no-untyped-call]
    return out


class _Ring(torch.autograd.Function):
    """Ring attention. The backward pass sends keys and values around the ring again. The partial sums of the gradients
    of keys and values travel one hop behind them, so the last hop brings each sum to the rank that owns the keys and
    values.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BHSC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, cp: Axis, masks: Sequence[Mask] | None
    ) -> Tensor:
        out = lse = torch.empty(0)
        for hop, (block, (k, v)) in enumerate(_visible_keys_and_values(k_BGSC, v_BGSC, cp)):
            q = q_BHSC[:, :, block.queries]
            if masks:
                more, more_lse = document_attention.forward(q, k, v, masks[hop])
            else:
                more, more_lse = flash_attention.forward(q, k, v, block.causal)
            # The rank's own block is first, and each query attends to at least one key of it.
            if block.causal:
                out, lse = more.to(more_lse.dtype), more_lse
            else:
                flash_attention.merge(out[:, :, block.queries], lse[:, :, block.queries], more, more_lse)
        out = out.to(q_BHSC.dtype)
        ctx.save_for_backward(q_BHSC, k_BGSC, v_BGSC, out, lse)
        ctx.cp, ctx.layer, ctx.masks = cp, cp.meter.layer, masks
        return out

    @staticmethod
    def backward(ctx: Any, grad_BHSC: Tensor) -> Any:
        q_BHSC, k_BGSC, v_BGSC, out, lse = ctx.saved_tensors
        cp: Axis = ctx.cp
        grad_BHSC = grad_BHSC.contiguous()
        d_q = torch.zeros_like(q_BHSC, dtype=lse.dtype)
        own = sums = torch.zeros_like(torch.cat((k_BGSC, v_BGSC), -1), dtype=lse.dtype)
        with cp.meter.in_layer(ctx.layer):
            transfer: AsyncCollective | None = None
            for hop, (block, (k, v)) in enumerate(_visible_keys_and_values(k_BGSC, v_BGSC, cp)):
                grad, q, o, log = (x[:, :, block.queries] for x in (grad_BHSC, q_BHSC, out, lse))
                log = log.contiguous()  # the CUDA kernel ignores the strides of the log-sum-exp
                if ctx.masks:
                    more, d_k, d_v = document_attention.backward(grad, q, k, v, o, log, ctx.masks[hop])
                else:
                    more, d_k, d_v = flash_attention.backward(grad, q, k, v, o, log, block.causal)
                d_q[:, :, block.queries] += more
                if block.causal:
                    own, sums = torch.cat((d_k, d_v), -1).to(lse.dtype), torch.zeros_like(own)
                    continue
                if transfer:
                    transfer.wait()
                sums[:, :, block.keys] += torch.cat((d_k, d_v), -1)
                transfer, sums = cp.start_ring(sums)
            if transfer:
                transfer.wait()
        d_k, d_v = torch.split((own + sums).to(k_BGSC.dtype), [k_BGSC.shape[-1], v_BGSC.shape[-1]], -1)
        return d_q.to(q_BHSC.dtype), d_k, d_v, None, None


def _visible_keys_and_values(
    k_BGSC: Tensor, v_BGSC: Tensor, cp: Axis
) -> Iterator[tuple[VisibleBlock, tuple[Tensor, ...]]]:
    """Yield the visible keys and values, [B, G, keys, C] and [B, G, keys, V], of this rank and then of each previous
    rank of the ring.

    The transfer of the next block overlaps with the computation on the current block.
    """
    kv, widths = torch.cat((k_BGSC, v_BGSC), -1), [k_BGSC.shape[-1], v_BGSC.shape[-1]]
    for hop in range(cp.size):
        transfer, received = cp.start_ring(kv) if hop + 1 < cp.size else (None, kv)
        block = visible_block(cp.rank, (cp.rank - hop) % cp.size, kv.shape[2])
        yield block, torch.split(kv[:, :, block.keys], widths, -1)
        if transfer:
            transfer.wait()
        kv = received
