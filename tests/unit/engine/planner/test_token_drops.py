"""Compares the expected number of dropped (token, expert) pairs for a given expert capacity with a simulation in which
tokens choose experts at random."""

import numpy as np
import pytest

from engine.config.sizes import expert_capacity
from engine.planner.token_drops import expected_drops, matching_overdispersion

SEQUENCES, TOKENS, EXPERTS, TOP_K = 64, 128, 8, 2


def drawn(most: int, skew: float) -> tuple[list[list[int]], int]:
    """Draws the expert loads of a step in which each token chooses its experts independently. Returns the loads, and
    the number of token-expert pairs dropped if each expert takes at most `most` pairs of a sequence."""
    rng = np.random.default_rng(3)
    share = np.linspace(1 + skew, 1 - skew, EXPERTS)
    counts = rng.multinomial(TOKENS * TOP_K, share / share.sum(), size=SEQUENCES)
    return [counts.sum(0).tolist()], int(np.maximum(0, counts - most).sum())


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.0, 1.25])
@pytest.mark.parametrize("skew", [0.0, 0.5])
def test_drops_of_independent_tokens(factor: float, skew: float) -> None:
    most = expert_capacity(factor, TOKENS, TOP_K, EXPERTS)
    loads, dropped = drawn(most, skew)
    expected = expected_drops(loads, SEQUENCES, most, 1.0, TOKENS)
    assert expected == pytest.approx(dropped, rel=0.12, abs=30)


def test_tokens_that_choose_alike_drop_more() -> None:
    most = expert_capacity(1.0, TOKENS, TOP_K, EXPERTS)
    loads, _ = drawn(most, 0.0)
    drops = [expected_drops(loads, SEQUENCES, most, spread, TOKENS) for spread in (0.5, 1.0, 2.0, 4.0)]
    assert drops == sorted(drops) and drops[0] < 0.6 * drops[1]


def test_the_spread_is_read_off_present_drops() -> None:
    most = expert_capacity(1.0, TOKENS, TOP_K, EXPERTS)
    loads, _ = drawn(most, 0.3)
    dropped = expected_drops(loads, SEQUENCES, most, 2.2, TOKENS)
    assert matching_overdispersion(loads, SEQUENCES, most, dropped, TOKENS) == pytest.approx(2.2, rel=1e-3)


def test_a_capacity_of_all_tokens_drops_nothing() -> None:
    assert expert_capacity(100.0, TOKENS, TOP_K, EXPERTS) == TOKENS
    assert expected_drops([[SEQUENCES * TOKENS, 5]], SEQUENCES, TOKENS, 4.0, TOKENS) == pytest.approx(
        0.0, abs=1e-6
    )
