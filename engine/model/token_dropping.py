"""Expert capacity and token dropping: which of the chosen (token, expert) pairs run.

Shapes: B sequences, S tokens of this rank's slice, W tokens of a whole sequence, E experts.
"""

import math

import torch
from torch import Tensor

from engine.parallel.sequence_split import SequenceSlices


def highest(x: Tensor, k: int, dim: int = -1) -> Tensor:
    """Indices of the k largest along `dim`, best first; of equals the lower index, as `topk` does not promise."""
    return x.sort(stable=True, dim=dim, descending=True).indices.narrow(dim, 0, k)


def among_highest(x_BWE: Tensor, count: int) -> Tensor:
    """For each sequence and expert, whether a token is among the `count` highest, [B, W, E]."""
    return torch.zeros_like(x_BWE, dtype=torch.bool).scatter_(1, highest(x_BWE, count, 1), True)


HALF = {torch.float64: torch.float32, torch.float32: torch.float16}


def in_half(x_BSE: Tensor) -> Tensor:
    """With half of the digits: what tokens of one sequence are compared by, so that rounding does not decide.

    A sequence that begins with a run of equal tokens attends to nothing else, so the scores of these are equal but for
    the last digits, which every layout rounds in its own way. In half of the digits they tie, and position decides.
    """
    return x_BSE.to(HALF[x_BSE.dtype])


def by_position(
    slices: SequenceSlices, chosen_BSE: Tensor, scores_BSE: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    """First come, first served."""
    place_BSE, total_BE = slices.earlier_choices(chosen_BSE)
    return place_BSE < capacity, total_BE


def by_probability(
    slices: SequenceSlices, chosen_BSE: Tensor, scores_BSE: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    """Those with the highest scores among the tokens that chose the expert."""
    claims_BWE = slices.gather(in_half(scores_BSE).masked_fill(chosen_BSE == 0, -math.inf))
    return slices.own_slice(among_highest(claims_BWE, capacity)), (claims_BWE > -math.inf).sum(1)


WITHIN = {"position": by_position, "probability": by_probability}
"""(chosen, scores) -> whether a chosen pair is within capacity [B, S, E], and the whole sequence's choices [B, E]."""
