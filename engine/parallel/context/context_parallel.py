"""Context parallelism: attention over whole sequences that are split over the cp ranks.

Shapes: B sequences, H query heads and G key heads of this tp rank, S tokens of this cp rank, C head dimension.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels import document_attention
from engine.kernels.document_attention import Positions, mask_of
from engine.kernels.window_attention import window_attention
from engine.parallel.collectives import Axis
from engine.parallel.context.documents import Documents
from engine.parallel.context.ring_attention import ring_attention, visible_block
from engine.parallel.context.sequence_split import positions
from engine.parallel.context.ulysses import ulysses_attention

ATTENTION_METHODS: dict[str, Callable[..., Tensor]] = {
    "ulysses": ulysses_attention,
    "ring": ring_attention,
}


class ContextParallel:
    """Computes attention over the `cp` axis with one of the methods in ATTENTION_METHODS. `sequence` is the axis of all
    cp x tp ranks that share a sequence."""

    def __init__(self, cp: Axis, sequence: Axis, method: str, reset_positions: bool = False):
        self.cp, self.sequence = cp, sequence
        self._in_ring = cp.size > 1 and method == "ring"
        self._method, self._reset_positions = ATTENTION_METHODS[method], reset_positions

    @classmethod
    def whole(cls, tp: Axis) -> "ContextParallel":
        """An instance for runs without context parallelism: after the all-gather over tp, each tp rank has all tokens
        of the sequence."""
        return cls(Axis("cp", None, tp.meter), tp, "ring")

    def positions(self, seq_len: int) -> Tensor:
        """Positions of this rank's tokens in the sequence, [S]."""
        return positions(seq_len, self.cp.size, self.cp.rank)

    def rope_positions(self, seq_len: int) -> Tensor:
        """The positions for which this rank needs rotary factors: those of its tokens, or the whole sequence if
        positions restart at each document."""
        return torch.arange(seq_len) if self._reset_positions else self.positions(seq_len)

    def documents(self, starts_BW: Tensor, dtype: torch.dtype, window: int | None) -> Documents:
        """This rank's masks and positions for attention within documents. `starts_BW` contains, for each token of the
        whole sequences, the position where its document starts."""
        W, cp = starts_BW.shape[1], self.cp
        at = [positions(W, cp.size, rank, starts_BW.device) for rank in range(cp.size)]
        mine = at[cp.rank]
        seen = [Positions(whole := torch.arange(W, device=starts_BW.device), whole, starts_BW, window)]
        if self._in_ring:
            seen = []
            for hop in range(cp.size):
                owner = (cp.rank - hop) % cp.size
                block = visible_block(cp.rank, owner, len(mine))
                queries = mine[block.queries]
                seen.append(Positions(queries, at[owner][block.keys], starts_BW[:, queries], window))
        restarted = mine - starts_BW[:, mine] if self._reset_positions else None
        return Documents([mask_of(one, dtype) for one in seen], restarted)

    def attend(
        self,
        q_BHSC: Tensor,
        k_BGSC: Tensor,
        v_BGSC: Tensor,
        window: int | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Compute causal attention, [B, H, S, C]. By default, each query attends to all tokens up to its own. With
        `window`, it attends only to the last `window` of these tokens. With `documents`, its masks determine to which
        tokens a query attends. G divides H."""
        masks = documents.masks if documents else None
        if self.cp.size > 1:
            return self._method(q_BHSC, k_BGSC, v_BGSC, self.cp, window, masks)
        if masks:
            return document_attention.attention(q_BHSC, k_BGSC, v_BGSC, masks[0])
        return window_attention(q_BHSC, k_BGSC, v_BGSC, window)
