"""Compares the next-token probabilities with a plain reference implementation, and tests sampling from them."""

import math

import pytest
import torch
from torch import Tensor

from engine.sampling.choice import choose, probabilities
from engine.sampling.settings import Choice

CHOICES = [
    Choice(),
    Choice(0.5),
    Choice(top_k=3),
    Choice(top_k=100),
    Choice(top_p=0.6),
    Choice(top_p=1e-9),
    Choice(top_p=1.0),
    Choice(1.7, top_k=6, top_p=0.8),
    Choice(0),
]


def reference(logits: list[float], choice: Choice) -> list[float]:
    """The probability of each token, computed one token at a time in plain Python."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if choice.temperature == 0:
        return [float(token == ranked[0]) for token in range(len(logits))]
    weight = {t: math.exp((logits[t] - logits[ranked[0]]) / choice.temperature) for t in ranked}
    kept = ranked[: choice.top_k] if choice.top_k else ranked
    if choice.top_p is not None:
        total, sum_so_far, nucleus = sum(weight[t] for t in kept), 0.0, []
        for token in kept:
            if sum_so_far >= choice.top_p * total:
                break
            nucleus.append(token)
            sum_so_far += weight[token]
        kept = nucleus
    total = sum(weight[t] for t in kept)
    return [weight[t] / total if t in kept else 0.0 for t in range(len(logits))]


def some_logits() -> Tensor:
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(2)) * 2
    logits[1, 3] = logits[1, 7] = 9.0  # a tie for the first place
    return logits


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_probabilities_equal_the_reference(choice: Choice) -> None:
    logits = some_logits()
    wanted = [reference(row, choice) for row in logits.double().tolist()]
    torch.testing.assert_close(probabilities(logits, choice), torch.tensor(wanted, dtype=torch.float64))


def test_drawn_tokens_have_these_probabilities_and_depend_on_seed_and_position_only() -> None:
    logits, choice = some_logits()[:1], Choice(top_k=5, top_p=0.95, seed=4)
    rows = logits.expand(2000, -1)
    tokens = torch.cat([choose(rows, choice, position) for position in range(10)])
    shares = torch.bincount(tokens, minlength=11).double() / len(tokens)
    torch.testing.assert_close(shares, probabilities(logits, choice)[0], atol=0.012, rtol=0)
    assert not shares[probabilities(logits, choice)[0] == 0].any()
    assert torch.equal(choose(rows, choice, 3), choose(rows, choice, 3))
    assert not torch.equal(choose(rows, choice, 3), choose(rows, choice, 4))
    assert not torch.equal(choose(rows, choice, 3), choose(rows, Choice(seed=5), 3))
