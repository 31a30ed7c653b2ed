"""Whole sequences from their slices: what a router must know of tokens that lie on other ranks.

Shapes: B sequences, S tokens of this rank's slice, W tokens of a whole sequence, E experts.
"""

import torch
from torch import Tensor

from engine.parallel.comm import Axis


class Slices:
    """How a sequence is cut over the ranks that share it. No gradient passes through."""

    def __init__(self, tp: Axis):
        self._tp = tp
        self.count = tp.size

    def queue(self, chosen_BSE: Tensor) -> tuple[Tensor, Tensor]:
        """For 0/1 choices: how many earlier tokens of the whole sequence chose the same, [B, S, E], and the
        whole sequence's totals, [B, E]."""
        slices_PBE = self._tp.all_gather(chosen_BSE.sum(1, dtype=torch.int32))
        before_BE = slices_PBE[: self._tp.rank].sum(0)
        return chosen_BSE.cumsum(1) - chosen_BSE + before_BE.unsqueeze(1), slices_PBE.sum(0)

    def gather(self, x_BSE: Tensor) -> Tensor:
        """Every slice's values, in the order of the sequence, [B, W, E]."""
        return self._tp.all_gather(x_BSE).transpose(0, 1).flatten(1, 2)

    def mine(self, x_BWE: Tensor) -> Tensor:
        """This rank's slice of a whole sequence's values, [B, S, E]."""
        return x_BWE.chunk(self.count, 1)[self._tp.rank]
