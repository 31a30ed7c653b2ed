"""Compares the next-token probabilities with a plain reference implementation, and tests sampling from them, and that
the work does not grow with the square of the vocabulary."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.moe.token_dropping import highest
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


class Operations(TorchDispatchMode):
    """Counts the operations that torch runs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(work: Callable[[], object]) -> int:
    with Operations() as operations:
        work()
    return operations.count


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


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_large_vocabulary_takes_no_more_passes_than_a_small_one(choice: Choice) -> None:
    def passes(vocabulary: int) -> int:
        logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0))
        return operations(lambda: choose(logits, choice, 3))

    # With top_k, the small vocabulary may be sorted, and the large one ranked by k passes of two operations.
    assert passes(3000) <= passes(20) + 2 * 2 * math.log2(3000)


@pytest.mark.parametrize("k", [1, 7, 8, 15, 16, 17, 100, 255, 256])
def test_the_highest_values_are_those_of_a_stable_sort(k: int) -> None:
    """For every k, with many ties, and without a pass for each of many values."""
    x = torch.randint(0, 40, (5, 3, 256), generator=torch.Generator().manual_seed(k)).double() / 8
    expected = np.argsort(-x.numpy(), -1, kind="stable")[..., :k]
    assert np.array_equal(highest(x, k).numpy(), expected)
    assert operations(lambda: highest(x, k)) <= 4 * math.log2(256) + 2
