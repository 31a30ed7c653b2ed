"""The training sequences of a step on one rank, and their micro-batches.

Shapes: B sequences, S tokens of this cp rank, W tokens of a whole sequence, P multi-token prediction layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Sequences(NamedTuple):
    """Inputs and targets of B sequences, [B, S] for the S tokens that a rank needs. If attention stays within
    documents, `starts` [B, W] contains, for each token of the whole sequences, the position where its document starts.

    With multi-token prediction, targets are [B, 1 + P, S]: the next token, the token after it, and so on. A target is
    -1 if it would be after the last token of the sequence or, if attention stays within documents, after the end of the
    document."""

    tokens: Tensor
    targets: Tensor
    starts: Tensor | None = None

    @property
    def ahead(self) -> Tensor | None:
        """The targets, which multi-token prediction also reads as inputs; None without multi-token prediction."""
        return self.targets if self.targets.ndim == 3 else None

    def chunk(self, count: int) -> "list[Sequences]":
        """Split the sequences into `count` equal micro-batches."""
        return self.split(len(self.tokens) // count)

    def split(self, size: int) -> "list[Sequences]":
        """Split the sequences into micro-batches of `size` sequences; the last one may be smaller."""
        parts = (torch.split(x, size) for x in self if x is not None)
        return [Sequences(*part) for part in zip(*parts, strict=True)]
