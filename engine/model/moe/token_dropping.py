"""Expert capacity and token dropping: which of the (token, expert) pairs chosen by the router are computed, and which
are dropped.

Shapes: B sequences, S tokens of this rank's slice, W tokens of a whole sequence, E experts.
"""

import math

import torch
from torch import Tensor

from engine.parallel.context.sequence_split import SequenceSlices


def highest(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest values along the last dim, largest first. Ties go to the lower index: repeated `argmax`
    and a stable sort guarantee this, `topk` does not.

    k passes of `argmax` over n values cost k n, a sort n log n. On a CPU the sort is faster from k = 2 log2 n on
    (measured for n from 8 to 256).
    """
    if k > 2 * math.log2(x.shape[-1]):
        return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    best = [x.argmax(-1, keepdim=True)]
    for _ in range(k - 1):
        x = x.scatter(-1, best[-1], -math.inf) if len(best) == 1 else x.scatter_(-1, best[-1], -math.inf)
        best.append(x.argmax(-1, keepdim=True))
    return torch.cat(best, -1)


def among_highest(x_BWE: Tensor, count: int) -> Tensor:
    """Whether a token's score is one of the expert's `count` highest scores in the sequence, [B, W, E]. Of two equal
    scores, that of the earlier token counts as the higher one."""
    lowest_B1E = x_BWE.topk(count, 1, sorted=False).values.amin(1, keepdim=True)
    above, level = x_BWE > lowest_B1E, x_BWE == lowest_B1E
    room_B1E = count - above.sum(1, keepdim=True)
    return above | (level & (level.cumsum(1) <= room_B1E))


HALF = {torch.float64: torch.float32, torch.float32: torch.float16}


def in_half(x_BSE: Tensor) -> Tensor:
    """The scores with half as many bits: fp32 becomes fp16, fp64 becomes fp32. This keeps rounding errors from deciding
    how the tokens of a sequence are ranked. The scores of identical tokens differ only in the last digits, which depend
    on the layout. After the conversion the scores of identical tokens are equal, so the earlier token is ranked higher.
    """
    return x_BSE.to(HALF[x_BSE.dtype])


def by_position(
    slices: SequenceSlices, chosen_BSE: Tensor, scores_BSE: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    """For each expert, keep the first `capacity` (token, expert) pairs of the sequence."""
    earlier_BSE, total_BE = slices.earlier_choices(chosen_BSE)
    return earlier_BSE < capacity, total_BE


def by_probability(
    slices: SequenceSlices, chosen_BSE: Tensor, scores_BSE: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    """For each expert, keep the `capacity` (token, expert) pairs with the highest scores."""
    chosen_scores_BWE = slices.gather(in_half(scores_BSE).masked_fill(chosen_BSE == 0, -math.inf))
    return slices.own_slice(among_highest(chosen_scores_BWE, capacity)), (chosen_scores_BWE > -math.inf).sum(
        1
    )


WITHIN_CAPACITY = {"position": by_position, "probability": by_probability}
"""(slices, chosen, scores, capacity) -> whether a chosen pair is within capacity, [B, S, E], and the number of pairs of
the whole sequence that chose each expert, [B, E]."""
