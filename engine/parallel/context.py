"""Context parallelism: attention over a whole sequence whose tokens lie head and tail on the cp ranks.

Ulysses (Jacobs et al. 2023) trades tokens for heads: one all-to-all gives each rank the whole sequence of its share of
the heads, a second one brings the outputs back. A ring (Liu et al. 2023) keeps queries where they are and passes keys
and values round; what the causal mask leaves empty is neither computed nor looked at.

Shapes: B sequences, H query heads and G key heads of this tensor rank, S tokens of this cp rank, W = cp S tokens of a
whole sequence, C head width, P = cp.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import flash_attention
from engine.parallel.collectives import Axis, Started
from engine.parallel.sequence import positions


class Context:
    """How attention sees the whole sequence: `cp` and how it is used, and `sequence`, over all cp x tp ranks of it."""

    def __init__(self, cp: Axis, sequence: Axis, method: str):
        self.cp, self.sequence = cp, sequence
        self._method = METHODS[method]

    @classmethod
    def whole(cls, tp: Axis) -> "Context":
        """No cp: each tensor rank sees all tokens once its slices are gathered."""
        return cls(Axis("cp", None, tp.meter), tp, "ring")

    def positions(self, seq_len: int) -> Tensor:
        """Where in the sequence this rank's tokens stand, [S]."""
        return positions(seq_len, self.cp.size, self.cp.rank)

    def attend(self, q_BHSC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor) -> Tensor:
        """Causal attention over the whole sequence, [B, H, S, C]; G divides H."""
        if self.cp.size == 1:
            return _attend(q_BHSC, k_BGSC, v_BGSC)
        return self._method(q_BHSC, k_BGSC, v_BGSC, self.cp)


def _attend(q_BHSC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q_BHSC, k_BGSC, v_BGSC, is_causal=True, enable_gqa=True)


# ------------------------------------------------------------------------------------------------------- ulysses


def ulysses(q_BHSC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, cp: Axis) -> Tensor:
    """P divides H. Key heads fewer than P are sent to each rank that needs them, so P and G divide one another."""
    P, (B, _, S, C), G = cp.size, q_BHSC.shape, k_BGSC.shape[1]
    if G < P:
        k_BGSC, v_BGSC = (x.repeat_interleave(P // G, 1) for x in (k_BGSC, v_BGSC))
    shares = [x.view(B, P, -1, S, C) for x in (q_BHSC, k_BGSC, v_BGSC)]
    widths = [share.shape[2] for share in shares]
    whole = _in_order(cp.swap(torch.cat(shares, 2).transpose(0, 1)))
    q_BHWC, k_BGWC, v_BGWC = torch.split(whole, widths, 1)
    out_BHWC = _attend(q_BHWC, k_BGWC, v_BGWC)
    return cp.swap(_in_slices(out_BHWC, P)).transpose(0, 1).flatten(1, 2)


def _in_order(x_PBHSC: Tensor) -> Tensor:
    """Each rank's head and tail as whole sequences, [B, H, W, C]."""
    head, tail = x_PBHSC.chunk(2, 3)
    return torch.cat((head, tail.flip(0))).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _in_slices(x_BHWC: Tensor, P: int) -> Tensor:
    """The inverse of `_in_order`."""
    chunks = torch.stack(x_BHWC.chunk(2 * P, 2))
    return torch.cat((chunks[:P], chunks[P:].flip(0)), 3)


# ---------------------------------------------------------------------------------------------------------- ring


@dataclass(frozen=True)
class Part:
    """Of a rank's queries and another's keys, those between which the causal mask leaves something."""

    queries: slice
    keys: slice
    causal: bool


def part(rank: int, owner: int, S: int) -> Part:
    """What queries of `rank` see of the keys of `owner`, both head and tail: always half of S x S, whoever it is."""
    if owner == rank:
        return Part(slice(0, S), slice(0, S), causal=True)
    if owner < rank:  # its head comes before both chunks, its tail after both
        return Part(slice(0, S), slice(0, S // 2), causal=False)
    return Part(slice(S // 2, S), slice(0, S), causal=False)  # all of it comes between the two chunks


def ring(q_BHSC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, cp: Axis) -> Tensor:
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
            following: Started | None = None
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


def _round(k_BGSC: Tensor, v_BGSC: Tensor, cp: Axis) -> Iterator[tuple[Part, Tensor]]:
    """Keys and values of this rank, then of each rank before it: [2, B, G, keys, C] of what its queries see.

    The next ones are on their way while these are in use.
    """
    kv = torch.stack((k_BGSC, v_BGSC))
    for hop in range(cp.size):
        started, coming = cp.start_ring(kv) if hop + 1 < cp.size else (None, kv)
        at = part(cp.rank, (cp.rank - hop) % cp.size, kv.shape[3])
        yield at, kv[:, :, :, at.keys]
        if started:
            started.wait()
        kv = coming


METHODS: dict[str, Callable[[Tensor, Tensor, Tensor, Axis], Tensor]] = {"ulysses": ulysses, "ring": ring}
