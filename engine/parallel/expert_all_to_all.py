"""Expert parallelism: uneven all-to-alls carry token rows to the ranks of their experts and back.

The rows take one or two hops, each over one axis. The direct method has one hop over the ep axis. The hierarchical
method has two, for an ep axis that spans nodes: the first within the node, to the rank that has the same local index as
the destination; the second between nodes, among the ranks with equal local index. So each node sends fewer and larger
messages. With both methods, an expert gets its rows in the order of their source ranks, so the results are
bit-identical.

`plan_dispatch` computes everything that has no gradient (counts and orders of rows); a recomputed forward reuses this
plan. `Dispatch.run` moves the rows. With ep = 1 the host never waits for the device.

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
    """The slot of each expert of a layer. A slot is (ep rank, index on that rank), numbered ep rank by ep rank.

    `logical[slot]` is the expert in the slot. `hops` are the axes of the all-to-alls, in order. The ep rank number is
    row-major in (rank in the last hop, ..., rank in the first hop).
    """

    def __init__(self, hops: Sequence[Axis], logical: Sequence[int], device: torch.device = CPU):
        self.hops, self.logical, self.device = tuple(hops), list(logical), device
        self.sizes = [axis.size for axis in self.hops]
        ranks = list(range(len(self.sizes)))
        # Keys number the slots in the order in which rows are sent: by rank in the first hop, then by rank in the
        # second hop, then by index.
        slots = torch.arange(len(logical)).view(*reversed(self.sizes), -1)
        slot_of_key = slots.permute(*reversed(ranks), len(ranks)).flatten()
        keys = torch.tensor(self.logical)[slot_of_key].argsort()
        self.keys_E = None if torch.equal(keys, torch.arange(len(logical))) else keys.to(device)


@dataclass(frozen=True)
class Hop:
    """One all-to-all of rows over one axis, and the order of the received rows that the next hop or the experts
    need."""

    axis: Axis
    send: list[int]
    receive: list[int]
    order_R: Tensor
    back_R: Tensor


@dataclass(frozen=True)
class Dispatch:
    """The plan for the kept pairs, sorted by destination: `pairs_N` are their indices in the router's [T, K] order."""

    pairs_N: Tensor
    tokens_N: Tensor
    hops: list[Hop]
    offsets: Tensor  # [local experts], end index of each expert's rows

    def run(self, x_TD: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The expert output of each kept pair, [N, D]. `experts` is called with the rows sorted by local expert and
        with the offsets."""
        # Its backward is one kernel; the backward of x[i] would add row by row.
        rows = x_TD.index_select(0, self.tokens_N)
        for hop in self.hops:
            rows = reordered(all_to_all(rows, hop.send, hop.receive, hop.axis), hop.order_R, hop.back_R)
        rows = experts(rows, self.offsets)
        for hop in reversed(self.hops):
            rows = all_to_all(reordered(rows, hop.back_R, hop.order_R), hop.receive, hop.send, hop.axis)
        return rows

    def combine(self, outputs_ND: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum of each token's outputs from `run`, [T, D]."""
        weights_N = weights_TK.flatten().index_select(0, self.pairs_N).to(outputs_ND.dtype)
        out: Tensor = _Combined.apply(outputs_ND, weights_N, self.tokens_N, len(weights_TK))  # type: ignore[no-untyped-call]
        return out


def plan_dispatch(experts_TK: Tensor, keep_TK: Tensor | None, placement: Placement) -> Dispatch:
    """Plan the dispatch of the pairs in `experts_TK` under `placement`. If `keep_TK` is given, only its True pairs are
    sent."""
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
    # bincount would synchronise on a GPU, to read the largest key.
    counts = keys.new_zeros(len(placement.logical)).scatter_add_(0, kept_keys, torch.ones_like(kept_keys))
    counts = counts.view(*placement.sizes, -1)
    # Each hop replaces one destination dim of `counts` (d) by a source dim (s): [d1, d2, e], [d2, s1, e], [e, s2, s1].
    hops: list[Hop] = []
    for n, axis in enumerate(placement.hops, 1):
        arrived = axis.exchange(counts)
        send, receive = torch.stack((_by_rank(counts), _by_rank(arrived))).tolist()
        counts = arrived.movedim(n, 0)
        order = _source_order(arrived, n, sum(receive))
        hops.append(Hop(axis, send, receive, order, order.argsort()))
    offsets = counts.reshape(counts.shape[0], -1).sum(1).cumsum(0).int()
    return Dispatch(pairs, tokens, hops, offsets)


def _by_rank(counts: Tensor) -> Tensor:
    return counts.flatten(1).sum(1)


def _source_order(counts: Tensor, dim: int, rows: int) -> Tensor:
    """The order, [rows], that makes `dim` the outermost dim of blocks of rows. The blocks are row-major, and `counts`
    has the number of rows of each."""
    blocks = torch.arange(counts.numel(), device=counts.device).view_as(counts).movedim(dim, 0).flatten()
    destination = blocks.argsort().repeat_interleave(counts.flatten(), output_size=rows)
    return destination.argsort(stable=True)


def reordered(rows_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
    """`rows_RD[order_R]` for a permutation with the inverse `back_R`. Its backward gathers rows, which is faster than
    the additions of the default backward."""
    out: Tensor = _Reordered.apply(rows_RD, order_R, back_R)  # type: ignore[no-untyped-call]
    return out


class _Combined(torch.autograd.Function):
    """zeros.index_add(0, tokens, outputs * weights), without the copies that autograd makes."""

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
