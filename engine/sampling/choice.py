"""Chooses the next token: greedily, or by sampling at a temperature from the top-k or top-p tokens.

Shapes: B sequences, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from engine.model.moe.token_dropping import highest
from engine.sampling.settings import Choice


def probabilities(logits_BV: Tensor, choice: Choice) -> Tensor:
    """For each token of the vocabulary, the probability that it is chosen, [B, V] in fp64. Ties are resolved in favour
    of the lower token id.

    `top_p` keeps the smallest set of most probable tokens whose probabilities sum to at least `top_p` (Holtzman et al.
    2020), so it keeps at least one token.
    """
    logits = logits_BV.double()
    if choice.temperature == 0:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    probs = (logits / choice.temperature).softmax(-1)
    V = probs.shape[-1]
    kept = V if choice.top_k is None else min(choice.top_k, V)
    top_p = 1.0 if choice.top_p is None else choice.top_p
    if kept == V and top_p == 1:
        return probs
    order = highest(probs, kept)
    ranked = probs.gather(1, order)
    ranked /= ranked.sum(-1, keepdim=True)
    if top_p < 1:
        before = ranked.cumsum(-1) - ranked
        ranked = ranked.masked_fill(before >= top_p, 0)
        ranked /= ranked.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(1, order, ranked)


def choose(logits_BV: Tensor, choice: Choice, position: int) -> Tensor:
    """The next token of each sequence, [B]. The choice depends only on the logits, the seed, the position and the index
    of the sequence, so it is the same in every layout."""
    probs = probabilities(logits_BV, choice)
    rng = np.random.Generator(np.random.Philox(key=choice.seed, counter=position << 64))
    drawn_B = torch.from_numpy(rng.random(len(probs))).to(probs.device)
    ends_BV = probs.cumsum(-1)
    tokens = torch.searchsorted(ends_BV, (drawn_B * ends_BV[:, -1]).unsqueeze(1), right=True).squeeze(1)
    # Rounding of the sum must not select a token after the last one with a nonzero probability.
    last = (probs > 0).int().cumsum(-1).argmax(-1)
    return torch.minimum(tokens, last)
