"""Splits a sequence over several ranks, and gathers router statistics over these ranks.

Over cp the split is load-balanced (zigzag): the sequence is cut into 2cp chunks, and rank r holds chunks r and 2cp-1-r,
so that all ranks have equal work under a causal mask (Dubey et al. 2024, section 3.3.2). The two chunks of a cp rank
are then concatenated and split evenly over tp. A tp slice may contain parts of both chunks, but each half of the slice
is contiguous; these halves are called *pieces*.

Shapes: B sequences, S tokens of this rank's slice, W tokens of a whole sequence, E experts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.device import CPU
from engine.parallel.collectives import Axis


def zigzag_pieces(cp: int, tp: int = 1) -> list[list[int]]:
    """For each of the cp x tp ranks, the indices of the pieces (the contiguous halves of its slice) that it holds; with
    cp = 1, a slice is one piece. Ranks are in an order in which tp varies fastest, and pieces are numbered in sequence
    order."""
    if cp == 1:
        return [[rank] for rank in range(tp)]
    chunks = [
        [*range(c * tp, (c + 1) * tp), *range((2 * cp - 1 - c) * tp, (2 * cp - c) * tp)] for c in range(cp)
    ]
    return [pieces[2 * t : 2 * t + 2] for pieces in chunks for t in range(tp)]


def positions(seq_len: int, cp: int, rank: int, device: torch.device = CPU) -> Tensor:
    """The sequence positions [S] of cp rank `rank`'s tokens, in ascending order."""
    held = zigzag_pieces(cp)
    length = seq_len // (cp * len(held[rank]))
    return torch.cat([torch.arange(n * length, (n + 1) * length, device=device) for n in held[rank]])


class SequenceSlices:
    """Computes router statistics over all ranks that share a sequence, without gradients.

    `axis` contains these cp x tp ranks, in an order in which tp varies fastest; it runs and meters the gathers.
    """

    def __init__(self, axis: Axis, cp: int = 1):
        self._axis = axis
        self.count = axis.size
        held = zigzag_pieces(cp, axis.size // cp)
        self._own_pieces = held[axis.rank]
        by_piece = {piece: n for n, piece in enumerate(piece for pieces in held for piece in pieces)}
        self._sequence_order = [by_piece[piece] for piece in range(len(by_piece))]

    def earlier_choices(self, chosen_BSE: Tensor) -> tuple[Tensor, Tensor]:
        """Count the tokens of the whole sequence that are routed to each expert, before each token and in total.
        `chosen_BSE` is 1 where the router chose the expert for the token, else 0. Returns two counts: [B, S, E], how
        many tokens before each token are routed to the expert, and [B, E], how many tokens of the sequence are routed
        to it.
        """
        parts = chosen_BSE.chunk(len(self._own_pieces), 1)
        counts = _counts(parts)
        ends = self.gather(counts).cumsum(1, dtype=torch.int32)
        earlier = []
        for part, count, piece in zip(parts, counts.unbind(1), self._own_pieces, strict=True):
            before_BE = ends[:, piece] - count
            earlier.append(part.cumsum(1) - part + before_BE.unsqueeze(1))
        return torch.cat(earlier, 1), ends[:, -1]

    def start_totals(self, chosen_BSE: Tensor) -> Callable[[], Tensor]:
        """Start to count how many tokens of the whole sequence are routed to each expert. `chosen_BSE` is 1 where the
        router chose the expert for the token, else 0. The returned function yields the counts, [B, E]: its first call
        waits for the counts of the other ranks, and caches the result, because recomputation needs it again."""
        counts = _counts(chosen_BSE.chunk(len(self._own_pieces), 1))
        shape, gathered, started = counts.shape, counts, None
        if self.count > 1:
            gathered = counts.new_empty(self.count, *shape)
            started = self._axis.start_all_gather(gathered.flatten(), counts.flatten(), True)
        found: Tensor | None = None

        def totals() -> Tensor:
            nonlocal gathered, started, found
            if found is None:
                if started is not None:
                    started.wait()
                found = gathered.view(self.count, *shape).sum((0, 2), dtype=torch.int32)
                gathered, started = found, None  # frees the counts of the slices
            return found

        return totals

    def gather(self, x_BSE: Tensor) -> Tensor:
        """Gather the values of all slices in sequence order, [B, W, E]."""
        slices = self._axis.all_gather(x_BSE).unbind()
        pieces = [piece for held in slices for piece in held.chunk(len(self._own_pieces), 1)]
        return torch.cat([pieces[n] for n in self._sequence_order], 1)

    def own_slice(self, x_BWE: Tensor) -> Tensor:
        """This rank's slice of the values of a whole sequence, [B, S, E]."""
        pieces = x_BWE.chunk(len(self._sequence_order), 1)
        return torch.cat([pieces[n] for n in self._own_pieces], 1)


def _counts(parts: Sequence[Tensor]) -> Tensor:
    """For each of the given parts of a slice, the number of tokens routed to each expert, [B, parts, E]."""
    return torch.stack([part.sum(1, dtype=torch.int32) for part in parts], 1)
