"""How a sequence is cut over the ranks that share it, and what a router must know of tokens on other ranks.

Over cp it is cut head and tail: of 2 cp chunks in order, rank r holds chunks r and 2 cp - 1 - r, so that under a causal
mask all ranks have equally much to attend to (Dubey et al. 2024, section 3.3.2). Over tp those are cut on, in order.
A slice may then straddle its two chunks, but each *half* of it is one run of tokens: the pieces counted in below.

Shapes: B sequences, S tokens of this rank's slice, W tokens of a whole sequence, E experts.
"""

import torch
from torch import Tensor

from engine.parallel.collectives import Axis


def zigzag_pieces(cp: int, tp: int = 1) -> list[list[int]]:
    """The pieces that each of cp x tp ranks holds, tp fastest; pieces are numbered in the order of the sequence."""
    if cp == 1:
        return [[rank] for rank in range(tp)]
    chunks = [
        [*range(c * tp, (c + 1) * tp), *range((2 * cp - 1 - c) * tp, (2 * cp - c) * tp)] for c in range(cp)
    ]
    return [pieces[2 * t : 2 * t + 2] for pieces in chunks for t in range(tp)]


def positions(seq_len: int, cp: int, rank: int) -> Tensor:
    """Where in the sequence the tokens of cp rank `rank` stand, [S]."""
    held = zigzag_pieces(cp)
    return torch.arange(seq_len).view(cp * len(held[rank]), -1)[held[rank]].flatten()


class SequenceSlices:
    """The slices of all ranks that share a sequence. No gradient passes through.

    `axis` is over those cp x tp ranks, tp fastest; what is gathered is metered there.
    """

    def __init__(self, axis: Axis, cp: int = 1):
        self._axis = axis
        self.count = axis.size
        held = zigzag_pieces(cp, axis.size // cp)
        self._mine = held[axis.rank]
        by_piece = {piece: n for n, piece in enumerate(piece for pieces in held for piece in pieces)}
        self._in_order = [by_piece[piece] for piece in range(len(by_piece))]

    def earlier_choices(self, chosen_BSE: Tensor) -> tuple[Tensor, Tensor]:
        """For 0/1 choices: how many earlier tokens of the whole sequence chose the same, [B, S, E], and the
        whole sequence's totals, [B, E]."""
        parts = chosen_BSE.chunk(len(self._mine), 1)
        counts = torch.stack([part.sum(1, dtype=torch.int32) for part in parts], 1)
        ends = self.gather(counts).cumsum(1, dtype=torch.int32)
        places = []
        for part, count, piece in zip(parts, counts.unbind(1), self._mine, strict=True):
            before_BE = ends[:, piece] - count
            places.append(part.cumsum(1) - part + before_BE.unsqueeze(1))
        return torch.cat(places, 1), ends[:, -1]

    def gather(self, x_BSE: Tensor) -> Tensor:
        """Every slice's values, in the order of the sequence, [B, W, E]."""
        slices = self._axis.all_gather(x_BSE).unbind()
        pieces = [piece for held in slices for piece in held.chunk(len(self._mine), 1)]
        return torch.cat([pieces[n] for n in self._in_order], 1)

    def own_slice(self, x_BWE: Tensor) -> Tensor:
        """This rank's slice of a whole sequence's values, [B, S, E]."""
        pieces = x_BWE.chunk(len(self._in_order), 1)
        return torch.cat([pieces[n] for n in self._mine], 1)
