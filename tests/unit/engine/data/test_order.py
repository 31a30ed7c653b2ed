"""The order of samples: each sample comes once per epoch, and the weights determine the shares of the sources."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.order import BLOCK, SampleOrder, shares_of
from engine.data.permutation import Permutation


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000), st.text(max_size=8))
def test_a_permutation_has_each_number_once(size: int, key: str) -> None:
    assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


def test_permutations_of_two_keys_differ_and_do_not_keep_the_order() -> None:
    numbers = np.arange(10_000)
    one, other = (Permutation(len(numbers), key)(numbers) for key in ("1", "2"))
    assert (one == other).mean() < 0.01
    # Neighbours of a random order are on average a third of the range apart.
    assert 0.3 < np.abs(np.diff(one)).mean() / len(numbers) < 0.37


def test_without_weights_each_epoch_has_each_sample_once_in_another_order() -> None:
    order = SampleOrder([7, 11, 100], None, 3)
    seen = []
    for epoch in range(3):
        places = order(np.arange(epoch * 118, (epoch + 1) * 118))
        assert {*places.epoch.tolist()} == {epoch}
        seen.append([*zip(places.source.tolist(), places.index.tolist(), strict=True)])
    assert len({*seen[0]}) == 118 and {*seen[0]} == {*seen[1]} == {*seen[2]}
    assert seen[0] != seen[1] != seen[2]


def test_with_weights_sources_have_their_shares_and_each_sample_comes_once_an_epoch() -> None:
    order = SampleOrder(sizes := [7000, 1100, 10_000], [2.0, 1.0, 1.0], 3)
    places = order(np.arange(BLOCK + 1000))
    assert np.bincount(places.source[:BLOCK]).tolist() == [BLOCK // 2, BLOCK // 4, BLOCK // 4]
    for source, size in enumerate(sizes):
        of_source = places.index[places.source == source]
        for start in range(0, len(of_source) - size, size):
            assert sorted(of_source[start : start + size].tolist()) == list(range(size))


@pytest.mark.parametrize("weights", [None, [2.0, 1.0]])
def test_the_end_of_the_last_epoch(weights: list[float] | None) -> None:
    order = SampleOrder([500, 40], weights, 1)
    end = order.samples_in(2)
    assert order(np.arange(end)).epoch.max() == 1
    assert order(np.array([end])).epoch.tolist() == [2]


def test_shares_add_up_and_none_is_zero() -> None:
    assert shares_of([1, 1, 1]) == [21846, 21845, 21845]
    tiny = shares_of([1e-9] * 100 + [1.0])
    assert sum(tiny) == BLOCK and min(tiny) == 1
