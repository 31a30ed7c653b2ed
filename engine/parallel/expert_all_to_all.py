"""Expert parallelism: uneven all-to-alls carry token rows to the ranks of their experts and back.

The rows take one or two hops, each over one axis. The direct method has one hop over the ep axis. The hierarchical
method, for an ep axis that spans nodes, has two hops. The first hop stays within the node and goes to the rank that has
the same local index as the destination. The second hop crosses nodes: it goes to the destination, which has the same
local index as the rank that forwards the rows. So each node sends fewer and larger messages. With both methods, an
expert receives its rows in the order of their source ranks, so the two methods give bit-identical results.

`plan_dispatch` computes everything that has no gradient: the counts and the order of rows. A recomputed forward pass
reuses this plan. `plan_dispatch` counts and scatters rows without sorting. The counts of the first hop are sent before
the local order is computed. `Dispatch.send` starts the first all-to-all, so that the caller can compute something else
before `Dispatch.run`.

With ep = 1 the host never waits for the device, because the rows that contain no (token, expert) pair stay at the end
and are not computed. With ep > 1 the host waits once, for the row counts of all hops.

Shapes: T tokens of this rank, N rows of (token, expert) pairs, R rows received, E experts, K experts of a token, P
ranks of a hop's axis.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.device import CPU
from engine.kernels.precision import at_least_fp32
from engine.parallel.autograd_collectives import OverlappedAllToAll, all_to_all
from engine.parallel.collectives import AsyncCollective, Axis


class Placement:
    """Which rank holds each expert of a layer, and at which index. The pair (ep rank, index on that rank) is called a
    slot; slots are ordered by ep rank, then by index.

    `logical[slot]` is the expert in the slot. `hops` are the axes of the all-to-alls, in order. ep ranks are numbered
    in row-major order of (rank in the last hop, ..., rank in the first hop).
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
    """One all-to-all of rows over one axis, and the permutation that brings the received rows into the order that the
    next hop or the experts need."""

    axis: Axis
    send: list[int]
    receive: list[int]
    order_R: Tensor
    back_R: Tensor


@dataclass(frozen=True)
class Dispatch:
    """The plan for the (token, expert) pairs that are not dropped, as rows sorted by destination.

    `rows_TK`: the row of each pair; 0 for a dropped pair. `keep_TK`: which pairs are not dropped; None: no pair is
    dropped. `filled`: a tensor with the number of rows that contain a pair; None if all N rows do. `by_token`: True if
    K < E; outputs are then summed over the K pairs of each token. Otherwise (expert choice), outputs are added row by
    row.
    """

    rows_TK: Tensor
    tokens_N: Tensor
    keep_TK: Tensor | None
    filled: Tensor | None
    by_token: bool
    hops: list[Hop]
    offsets: Tensor  # [local experts], end index of each expert's rows

    def send(self, x_TD: Tensor) -> "Sent":
        """Copy the tokens to their rows, and start sending the rows over the first hop."""
        rows: Tensor = _Rows.apply(x_TD, self)  # type: ignore[no-untyped-call]
        if not self.hops:
            return Sent(rows, None)
        hop = self.hops[0]
        first = OverlappedAllToAll(hop.axis, hop.send, hop.receive)
        return Sent(first.start(rows), first)

    def run(self, sent: "Sent", experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The expert output of each row, [N, D]. Calls `experts` with the rows, sorted by local expert, and with the
        index at which each expert's rows end."""
        rows = sent.rows if sent.first is None else sent.first.wait(sent.rows)
        for n, hop in enumerate(self.hops):
            rows = rows if n == 0 else all_to_all(rows, hop.send, hop.receive, hop.axis)
            rows = reordered(rows, hop.order_R, hop.back_R)
        rows = experts(rows, self.offsets)
        for hop in reversed(self.hops):
            rows = all_to_all(reordered(rows, hop.back_R, hop.order_R), hop.receive, hop.send, hop.axis)
        return rows

    def combine(self, outputs_ND: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum of each token's outputs from `run`, [T, D], summed in at least fp32."""
        out: Tensor = _Combined.apply(outputs_ND, weights_TK, self)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class Sent:
    """Rows that are being sent to their experts. `first`: the all-to-all of the first hop, which is already running;
    None with ep = 1, which needs no hop."""

    rows: Tensor
    first: OverlappedAllToAll | None


def plan_dispatch(
    experts_TK: Tensor, keep_TK: Tensor | None, placement: Placement, most_rows: int | None = None
) -> Dispatch:
    """Plan the dispatch of the (token, expert) pairs in `experts_TK` under `placement`. The experts of a token are
    distinct. If `keep_TK` is given, only pairs for which it is True are sent; `most_rows` is an upper bound on the
    number of these pairs (default: all pairs)."""
    T, K = experts_TK.shape
    E = len(placement.logical)
    keys_TK = experts_TK if placement.keys_E is None else placement.keys_E[experts_TK]
    keys_KT = keys_TK.T.contiguous()
    runs_ET = torch.zeros(E, T, dtype=torch.int32, device=keys_TK.device)
    runs_ET.scatter_(0, keys_KT, 1 if keep_TK is None else keep_TK.T.int())
    # Pairs of the same expert up to this token. On a GPU, torch is much slower along a dimension that is not the last.
    earlier_ET = runs_ET.cumsum(1, dtype=torch.int32)
    counts_E = earlier_ET[:, -1].long()
    counts = counts_E.view(*placement.sizes, -1)
    first = placement.hops[0].start_row_exchange(counts, async_op=True) if placement.hops else None

    ends_E = counts_E.cumsum(0)
    rows_KT = earlier_ET.gather(0, keys_KT) + (ends_E - counts_E - 1)[keys_KT]
    if keep_TK is not None:
        rows_KT = rows_KT.masked_fill(~keep_TK.T, 0)
    rows_TK = rows_KT.T  # `rows_TK[:, k]` is contiguous, so gathers by it are faster on a GPU
    hops, offsets = _plan_hops(placement, counts, first)
    rows = T * K
    if hops:
        rows = sum(hops[0].send)
    elif keep_TK is not None and most_rows is not None:
        rows = min(rows, most_rows)
    # Dropped pairs get the row after the last one, which is cut off.
    row_of_pair = rows_TK if keep_TK is None else rows_TK.masked_fill(~keep_TK, rows)
    token_of_pair = torch.arange(T, device=keys_TK.device).unsqueeze(1).expand(T, K)
    tokens_N = keys_TK.new_zeros(rows + (keep_TK is not None))
    tokens_N = tokens_N.scatter_(0, row_of_pair.flatten(), token_of_pair.flatten())[:rows]
    filled = None if keep_TK is None or hops else ends_E[-1]
    return Dispatch(rows_TK, tokens_N, keep_TK, filled, K < E, hops, offsets)


def _plan_hops(
    placement: Placement, counts: Tensor, first: tuple[AsyncCollective, Tensor] | None
) -> tuple[list[Hop], Tensor]:
    """Returns the hops, and the index at which the rows of each local expert end. `counts`: number of rows that this
    rank sends to each slot. `first`: the exchange of the first hop's counts, which is already running; None without
    hops."""
    # Each hop replaces one destination dim of `counts` (d) by a source dim (s): [d1, d2, e], [d2, s1, e], [e, s2, s1].
    sizes, arrivals = list[Tensor](), list[Tensor]()
    for n, axis in enumerate(placement.hops, 1):
        if first is not None and n == 1:
            first[0].wait()
            arrived = first[1]
        else:
            arrived = axis.exchange(counts)
        sizes.append(torch.stack((_by_rank(counts), _by_rank(arrived))).flatten())
        arrivals.append(arrived)
        counts = arrived.movedim(n, 0)
    offsets = counts.reshape(counts.shape[0], -1).sum(1).cumsum(0).int()
    if not sizes:
        return [], offsets
    numbers = iter(torch.cat(sizes).tolist())  # the host waits for the device here
    hops = []
    for n, (axis, arrived) in enumerate(zip(placement.hops, arrivals, strict=True), 1):
        send, receive = ([next(numbers) for _ in range(axis.size)] for _ in range(2))
        hops.append(Hop(axis, send, receive, *_source_order(arrived, n, sum(receive))))
    return hops, offsets


def _by_rank(counts: Tensor) -> Tensor:
    return counts.flatten(1).sum(1)


def _source_order(counts: Tensor, dim: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns a permutation [rows] that reorders blocks of rows so that dimension `dim` of `counts` becomes the
    outermost, and the inverse permutation. The blocks are in row-major order of `counts`, which contains the number of
    rows of each block."""
    flat = counts.flatten()
    blocks = torch.arange(len(flat), device=flat.device)
    moved = blocks.view_as(counts).movedim(dim, 0).flatten()  # blocks in the order of their destination
    starts = torch.empty_like(flat).scatter_(0, moved, flat[moved].cumsum(0) - flat[moved])
    # By block: its offset in the new order minus its offset on arrival.
    shifts = starts - (flat.cumsum(0) - flat)
    arrival = torch.arange(rows, device=flat.device)
    back = arrival + shifts[blocks.repeat_interleave(flat, output_size=rows)]
    return torch.empty_like(back).scatter_(0, back, arrival), back


def reordered(rows_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
    """`rows_RD[order_R]`, where `order_R` is a permutation and `back_R` its inverse. The backward pass gathers rows,
    which is faster than the scatter-add in autograd's own backward pass."""
    out: Tensor = _Reordered.apply(rows_RD, order_R, back_R)  # type: ignore[no-untyped-call]
    return out


def _sum_by_token(rows_ND: Tensor, weights_TK: Tensor | None, plan: Dispatch) -> Tensor:
    """The sum of each token's rows, [T, D], in at least fp32.

    With `plan.by_token`, the sum is computed pair by pair and is the same in every run. Otherwise `index_add_` adds the
    rows; on a GPU the order of the additions may vary, unless torch's deterministic algorithms are on."""
    T, K = plan.rows_TK.shape
    if not plan.by_token or not len(rows_ND):
        total = at_least_fp32(rows_ND.new_empty(0)).new_zeros(T, rows_ND.shape[1])
        if not len(rows_ND):
            return total
        weighted = rows_ND if weights_TK is None else rows_ND * _by_row(weights_TK, plan).unsqueeze(-1)
        if plan.filled is not None:
            weighted = _without_tail(weighted, plan.filled)
        return total.index_add_(0, plan.tokens_N, weighted.to(total.dtype))
    for k in range(K):
        part = rows_ND.index_select(0, plan.rows_TK[:, k])
        if plan.keep_TK is not None:
            part = part.masked_fill_(~plan.keep_TK[:, k].unsqueeze(-1), 0.0)
        part = at_least_fp32(part)
        weight_T1 = None if weights_TK is None else weights_TK[:, k].unsqueeze(-1)
        if k == 0:
            total = part if weight_T1 is None else part.mul_(weight_T1)
        elif weight_T1 is None:
            total += part
        else:
            total.addcmul_(part, weight_T1)
    return total


def _by_row(values_TK: Tensor, plan: Dispatch) -> Tensor:
    """The values of the (token, expert) pairs, reordered from [T, K] to rows [N]; 0 for rows without a pair."""
    rows = plan.rows_TK
    if plan.keep_TK is not None:
        rows = rows.masked_fill(~plan.keep_TK, len(plan.tokens_N))
    by_row = values_TK.new_zeros(len(plan.tokens_N) + (plan.keep_TK is not None))
    return by_row.scatter_(0, rows.flatten(), values_TK.flatten())[: len(plan.tokens_N)]


def _without_tail(rows_ND: Tensor, filled: Tensor) -> Tensor:
    """`rows_ND` with zeros in all rows from index `filled` on, because the experts do not write these rows."""
    behind = torch.arange(len(rows_ND), device=rows_ND.device) >= filled
    return rows_ND.masked_fill(behind.unsqueeze(-1), 0.0)


class _Rows(torch.autograd.Function):
    """Makes the rows: row n is a copy of the hidden state of token `tokens_N[n]`. Backward sums the gradients of a
    token's rows in at least fp32."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(plan.rows_TK, plan.tokens_N)  # saved, so that saved-tensor hooks apply
        return x_TD.index_select(0, plan.tokens_N)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> Any:
        return _sum_by_token(grad_ND, None, ctx.plan).to(grad_ND.dtype), None


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs_ND: Tensor, weights_TK: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(outputs_ND, weights_TK)
        return _sum_by_token(outputs_ND, weights_TK, plan).to(outputs_ND.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        plan: Dispatch = ctx.plan
        outputs_ND, weights_TK = ctx.saved_tensors
        grad_ND = grad_TD.index_select(0, plan.tokens_N)
        d_weights_N = torch.linalg.vecdot(at_least_fp32(grad_ND), at_least_fp32(outputs_ND))
        d_weights_TK = weights_TK.new_zeros(weights_TK.shape)
        if len(d_weights_N):
            d_weights_TK = d_weights_N.to(weights_TK.dtype)[plan.rows_TK]
            if plan.keep_TK is not None:
                d_weights_TK = d_weights_TK.masked_fill(~plan.keep_TK, 0.0)
        weights_N = _by_row(weights_TK, plan).to(grad_ND.dtype)
        return grad_ND.mul_(weights_N.unsqueeze(-1)), d_weights_TK, None


class _Reordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.save_for_backward(back_R)
        return rows_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None
