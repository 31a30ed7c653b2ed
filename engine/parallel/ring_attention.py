"""Ring attention (Liu et al. 2023): queries stay on their rank, keys and values go round the cp ranks.

Blocks that the causal mask leaves empty are neither computed nor read.

Shapes: B sequences, H query heads and G key heads of this tensor rank, S tokens of this cp rank, C head width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels import flash_attention
from engine.parallel.collectives import AsyncCollective, Axis


@dataclass(frozen=True)
class VisibleBlock:
    """Of a rank's queries and another's keys, those between which the causal mask leaves something."""

    queries: slice
    keys: slice
    causal: bool


def visible_block(rank: int, owner: int, S: int) -> VisibleBlock:
    """What queries of `rank` see of the keys of `owner`, both head and tail: always half of S x S, whoever it is."""
    if owner == rank:
        return VisibleBlock(slice(0, S), slice(0, S), causal=True)
    if owner < rank:  # its head comes before both chunks, its tail after both
        return VisibleBlock(slice(0, S), slice(0, S // 2), causal=False)
    return VisibleBlock(slice(S // 2, S), slice(0, S), causal=False)  # all of it comes between the two chunks


def ring_attention(q_BHSC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, cp: Axis) -> Tensor:
    out: Tensor = _Ring.apply(q_BHSC, k_BGSC, v_BGSC, cp)  # type: ignore[no-untyped-call]
    return out


class _Ring(torch.autograd.Function):
    """Backward passes keys and values round again; the sums of their gradients follow them and end at their owners."""

    @staticmethod
    def forward(ctx: Any, q_BHSC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, cp: Axis) -> Tensor:
        out = lse = torch.empty(0)
        for at, (k, v) in _round(k_BGSC, v_BGSC, cp):
            more, more_lse = flash_attention.forward(q_BHSC[:, :, at.queries], k, v, at.causal)
            if at.causal:  # the first of all: each query sees at least its own key
                out, lse = more.to(more_lse.dtype), more_lse
            else:
                flash_attention.merge(out[:, :, at.queries], lse[:, :, at.queries], more, more_lse)
        out = out.to(q_BHSC.dtype)
        ctx.save_for_backward(q_BHSC, k_BGSC, v_BGSC, out, lse)
        ctx.cp, ctx.layer = cp, cp.meter.layer
        return out

    @staticmethod
    def backward(ctx: Any, grad_BHSC: Tensor) -> Any:
        q_BHSC, k_BGSC, v_BGSC, out, lse = ctx.saved_tensors
        cp: Axis = ctx.cp
        grad_BHSC = grad_BHSC.contiguous()
        d_q = torch.zeros_like(q_BHSC, dtype=lse.dtype)
        own = sums = torch.zeros(2, *k_BGSC.shape, dtype=lse.dtype, device=lse.device)
        with cp.meter.in_layer(ctx.layer):
            following: AsyncCollective | None = None
            for at, (k, v) in _round(k_BGSC, v_BGSC, cp):
                grad, q, o, log = (x[:, :, at.queries] for x in (grad_BHSC, q_BHSC, out, lse))
                # The kernel for CUDA reads log-sum-exps by bare pointer, without strides.
                more, d_k, d_v = flash_attention.backward(grad, q, k, v, o, log.contiguous(), at.causal)
                d_q[:, :, at.queries] += more
                if at.causal:
                    own, sums = torch.stack((d_k, d_v)).to(lse.dtype), torch.zeros_like(own)
                    continue
                if following:
                    following.wait()
                sums[:, :, :, at.keys] += torch.stack((d_k, d_v))
                following, sums = cp.start_ring(sums)
            if following:
                following.wait()
        d_k, d_v = (own + sums).to(k_BGSC.dtype)
        return d_q.to(q_BHSC.dtype), d_k, d_v, None


def _round(k_BGSC: Tensor, v_BGSC: Tensor, cp: Axis) -> Iterator[tuple[VisibleBlock, Tensor]]:
    """Keys and values of this rank, then of each rank before it: [2, B, G, keys, C] of what its queries see.

    The next ones are on their way while these are in use.
    """
    kv = torch.stack((k_BGSC, v_BGSC))
    for hop in range(cp.size):
        started, coming = cp.start_ring(kv) if hop + 1 < cp.size else (None, kv)
        at = visible_block(cp.rank, (cp.rank - hop) % cp.size, kv.shape[3])
        yield at, kv[:, :, :, at.keys]
        if started:
            started.wait()
        kv = coming
