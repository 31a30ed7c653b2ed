"""The training sequences of a step on one rank, and their micro-batches.

Shapes: B sequences, S tokens of this cp rank, W tokens of a whole sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Sequences(NamedTuple):
    """Inputs and targets of B sequences, [B, S] for the S tokens that a rank needs. If attention stays within
    documents, also the position where the document of each token of the whole sequences starts, [B, W]."""

    tokens: Tensor
    targets: Tensor
    starts: Tensor | None = None

    def chunk(self, count: int) -> "list[Sequences]":
        """Split the sequences into `count` equal micro-batches."""
        return self.split(len(self.tokens) // count)

    def split(self, size: int) -> "list[Sequences]":
        """Split the sequences into micro-batches of `size` sequences; the last one may be smaller."""
        parts = (torch.split(x, size) for x in self if x is not None)
        return [Sequences(*part) for part in zip(*parts, strict=True)]
