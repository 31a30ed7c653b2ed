"""The confidence interval of the ratio of step times after and before a change."""

import pytest

from agents.hub.commands.confidence import compared, student


@pytest.mark.parametrize(("freedom", "t"), [(3, 3.182), (5, 2.571), (9, 2.262), (18, 2.101), (1000, 1.962)])
def test_students_quantiles_match_the_table(freedom: float, t: float) -> None:
    assert student(0.975, freedom) == pytest.approx(t, rel=0.01)


def test_an_interval_has_its_stated_coverage() -> None:
    """If the knob has no effect, the 95 % interval contains the ratio 1 in about 95 of 100 cases."""
    import random

    chance = random.Random(7)
    held = 0
    for _ in range(400):
        before, after = ([chance.lognormvariate(4.6, 0.1) for _ in range(40)] for _ in range(2))
        found = compared(before, after)
        assert found is not None
        held += found.low <= 1.0 <= found.high
    assert 0.92 <= held / 400 <= 0.98


def test_too_few_values_are_not_compared() -> None:
    assert compared([1.0, 2.0, 3.0], [1.0] * 10) is None
    assert compared([1.0] * 10, [1.0, 0.0, 1.0, 1.0]) is None
