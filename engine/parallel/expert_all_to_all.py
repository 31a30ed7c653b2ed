"""Expert parallelism: rows to the ranks that hold their experts and back, with uneven all-to-all.

Rows travel in hops, one axis each. Direct is one hop over the ep axis. Hierarchical is two, for an ep axis that spans
nodes: first within the node, to the peer that has the destination's place in its node, then across nodes between ranks
of equal place, so that a node sends each other node fewer and larger messages. Either way the rows of an expert arrive
in the order of the ranks they came from, so results are the same to the bit.

`plan_dispatch` decides everything that needs no gradient (who sends how much where, and in what order), once a logical
forward; `Dispatch.run` moves the rows. With ep = 1 nothing synchronises with the host.

Shapes: T tokens of this rank, N kept (token, expert) pairs, R rows received, E experts, P ranks of a hop's axis.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.device import CPU
from engine.parallel.autograd_collectives import all_to_all
from engine.parallel.collectives import Axis


class Placement:
    """Which expert of a layer is where. A slot is (ep rank, index there), numbered ep rank by ep rank.

    `logical[slot]` is the expert in it. `hops` are the axes rows travel, first to last; the ep rank they lead to is
    (last hop's rank, ..., first hop's rank), the first hop's fastest.
    """

    def __init__(self, hops: Sequence[Axis], logical: Sequence[int], device: torch.device = CPU):
        self.hops, self.logical, self.device = tuple(hops), list(logical), device
        self.sizes = [axis.size for axis in self.hops]
        ranks = list(range(len(self.sizes)))
        # Rows leave sorted by the first hop's rank, then the next one's, then the index: a key numbers them so.
        slots = torch.arange(len(logical)).view(*reversed(self.sizes), -1)
        slot_of_key = slots.permute(*reversed(ranks), len(ranks)).flatten()
        keys = torch.tensor(self.logical)[slot_of_key].argsort()
        self.keys_E = None if torch.equal(keys, torch.arange(len(logical))) else keys.to(device)


@dataclass(frozen=True)
class Hop:
    """One exchange of rows over one axis, and the order in which the next hop, or the experts, want what came."""

    axis: Axis
    send: list[int]
    receive: list[int]
    order_R: Tensor
    back_R: Tensor


@dataclass(frozen=True)
class Dispatch:
    """The way of the kept pairs, sorted by where they go: `pairs_N` numbers them in the router's [T, K] order."""

    pairs_N: Tensor
    tokens_N: Tensor
    hops: list[Hop]
    offsets: Tensor  # [local experts], where each expert's rows end

    def run(self, x_TD: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Each kept pair's expert output, [N, D]; `experts` gets rows sorted by local expert and the offsets."""
        rows = x_TD.index_select(
            0, self.tokens_N
        )  # whose backward adds rows at once; that of x[i] one by one
        for hop in self.hops:
            rows = reordered(all_to_all(rows, hop.send, hop.receive, hop.axis), hop.order_R, hop.back_R)
        rows = experts(rows, self.offsets)
        for hop in reversed(self.hops):
            rows = all_to_all(reordered(rows, hop.back_R, hop.order_R), hop.receive, hop.send, hop.axis)
        return rows

    def combine(self, outputs_ND: Tensor, weights_TK: Tensor) -> Tensor:
        """Each token's sum of the outputs `run` gave it, times their weights, [T, D]."""
        weights_N = weights_TK.flatten().index_select(0, self.pairs_N).to(outputs_ND.dtype)
        out: Tensor = _Combined.apply(outputs_ND, weights_N, self.tokens_N, len(weights_TK))  # type: ignore[no-untyped-call]
        return out


def plan_dispatch(experts_TK: Tensor, keep_TK: Tensor | None, placement: Placement) -> Dispatch:
    """How the pairs `experts_TK` (of them those in `keep_TK`) reach the experts where `placement` has them."""
    keys = experts_TK.flatten()
    if placement.keys_E is not None:
        keys = placement.keys_E[keys]
    if keep_TK is None:
        pairs = torch.argsort(keys, stable=True)
    else:
        kept = keep_TK.flatten().nonzero().squeeze(-1)
        pairs = kept[torch.argsort(keys[kept], stable=True)]
    tokens = pairs // experts_TK.shape[1]
    kept_keys = keys[pairs]
    # As bincount, which on a GPU would wait for the largest key.
    counts = keys.new_zeros(len(placement.logical)).scatter_add_(0, kept_keys, torch.ones_like(kept_keys))
    counts = counts.view(*placement.sizes, -1)
    # Dim by dim `counts` turns from destinations to sources: [d1, d2, e], [d2, s1, e], at last [e, s2, s1].
    hops: list[Hop] = []
    for n, axis in enumerate(placement.hops, 1):
        arrived = axis.exchange(counts)
        send, receive = torch.stack((_by_rank(counts), _by_rank(arrived))).tolist()
        counts = arrived.movedim(n, 0)
        order = _reordering(arrived, n, sum(receive))
        hops.append(Hop(axis, send, receive, order, order.argsort()))
    offsets = counts.reshape(counts.shape[0], -1).sum(1).cumsum(0).int()
    return Dispatch(pairs, tokens, hops, offsets)


def _by_rank(counts: Tensor) -> Tensor:
    return counts.flatten(1).sum(1)


def _reordering(counts: Tensor, dim: int, rows: int) -> Tensor:
    """Where to take each row from, [rows], so that blocks of `counts` rows in row-major order get `dim` outermost."""
    blocks = torch.arange(counts.numel(), device=counts.device).view_as(counts).movedim(dim, 0).flatten()
    wanted = blocks.argsort().repeat_interleave(counts.flatten(), output_size=rows)
    return wanted.argsort(stable=True)


def reordered(rows_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
    """`rows_RD[order_R]`, a permutation that `back_R` undoes: backward then gathers too and need not add up."""
    out: Tensor = _Reordered.apply(rows_RD, order_R, back_R)  # type: ignore[no-untyped-call]
    return out


class _Combined(torch.autograd.Function):
    """zeros.index_add(0, tokens, outputs * weights), without the copies that autograd would make."""

    @staticmethod
    def forward(ctx: Any, outputs_ND: Tensor, weights_N: Tensor, tokens_N: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(outputs_ND, weights_N, tokens_N)
        out_TD = outputs_ND.new_zeros(tokens, outputs_ND.shape[1])
        return out_TD.index_add_(0, tokens_N, outputs_ND * weights_N.unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        outputs_ND, weights_N, tokens_N = ctx.saved_tensors
        grad_ND = grad_TD.index_select(0, tokens_N)
        d_weights_N = torch.linalg.vecdot(grad_ND, outputs_ND)
        return grad_ND.mul_(weights_N.unsqueeze(-1)), d_weights_N, None, None


class _Reordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.save_for_backward(back_R)
        return rows_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None
