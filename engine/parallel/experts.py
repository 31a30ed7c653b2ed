"""Expert parallelism: rows to the ranks that hold their experts and back, with uneven all-to-all.

`plan_dispatch` decides everything that needs no gradient (who sends how much where, and in what order), once a logical
forward; `Dispatch.run` moves the rows. With ep = 1 nothing synchronises with the host.

Shapes: T tokens of this rank, N kept (token, expert) pairs, R rows received, E experts, P ranks of the ep axis.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.parallel.comm import Axis


@dataclass(frozen=True)
class Dispatch:
    """The way of the kept pairs, sorted by expert: `pairs_N` numbers them in the router's [T, K] order."""

    axis: Axis
    pairs_N: Tensor
    tokens_N: Tensor
    offsets: Tensor  # [local experts], where each expert's rows end
    send: list[int]
    receive: list[int]
    by_expert_R: Tensor | None  # received rows, by source rank -> by expert
    by_source_R: Tensor | None  # and back

    def run(self, x_TD: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Each kept pair's expert output, [N, D]; `experts` gets rows sorted by local expert and the offsets."""
        rows = self.axis.route(x_TD[self.tokens_N], self.send, self.receive)
        if self.by_expert_R is None:
            return experts(rows, self.offsets)
        outputs = experts(rows[self.by_expert_R], self.offsets)[self.by_source_R]
        return self.axis.route(outputs, self.receive, self.send)


def plan_dispatch(experts_TK: Tensor, keep_TK: Tensor | None, count: int, axis: Axis) -> Dispatch:
    """How the pairs `experts_TK` (of them those in `keep_TK`) reach `count` experts spread over `axis`."""
    flat = experts_TK.flatten()
    if keep_TK is None:
        pairs = torch.argsort(flat, stable=True)
    else:
        kept = keep_TK.flatten().nonzero().squeeze(-1)
        pairs = kept[torch.argsort(flat[kept], stable=True)]
    sent_E = torch.bincount(flat[pairs], minlength=count)
    tokens = pairs // experts_TK.shape[1]
    if axis.size == 1:
        return Dispatch(axis, pairs, tokens, sent_E.cumsum(0).int(), [], [], None, None)
    received_PE = axis.exchange(sent_E.view(axis.size, -1))
    local_experts = torch.arange(received_PE.shape[1], device=flat.device).repeat(axis.size)
    by_expert = torch.argsort(local_experts.repeat_interleave(received_PE.flatten()), stable=True)
    return Dispatch(
        axis,
        pairs,
        tokens,
        received_PE.sum(0).cumsum(0).int(),
        sent_E.view(axis.size, -1).sum(1).tolist(),
        received_PE.sum(1).tolist(),
        by_expert,
        by_expert.argsort(),
    )
