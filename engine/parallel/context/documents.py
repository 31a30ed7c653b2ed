"""Data for attention within documents in one micro-batch: masks and rotary factors, shared by all layers."""

from collections.abc import Sequence

from torch import Tensor

from engine.kernels.document_attention import Mask


class Documents:
    """`masks`: one mask for whole sequences, or with ring attention, one mask for each hop. `positions` [B, S]:
    positions of this rank's tokens within their documents, if positions restart at each document; else None."""

    def __init__(self, masks: Sequence[Mask], positions: Tensor | None):
        self.masks, self._positions = masks, positions
        self._rope: Tensor | None = None

    def rope(self, table: Tensor) -> Tensor:
        """The rotary factors of this rank's tokens: selected from `table` if positions restart at each document, else
        `table` itself. The selected factors are computed once, and all layers share them."""
        if self._positions is None:
            return table
        if self._rope is None:
            self._rope = table[:, self._positions]
        return self._rope
