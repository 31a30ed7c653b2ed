"""Predicted step times for knob values that were in force earlier in the run, with and without a drift of all step
times."""

import numpy as np
import pytest

from engine.control.preview.run_level import Stretch, predict_again
from engine.planner.measured import Times


def stretch(values: str, mean: float, rng: np.random.Generator, noise: float = 0.03) -> Stretch:
    return Stretch(values, Times((mean * (1 + noise * rng.standard_normal(40))).tolist()))


def test_a_run_that_became_slower_is_slower_with_earlier_values_too() -> None:
    rng = np.random.default_rng(3)
    run = [
        stretch(*one, rng) for one in (("a", 100.0), ("b", 150.0), ("a", 101.0), ("c", 80.0), ("a", 200.0))
    ]
    low, likely, high = predict_again(run, "b")
    assert likely == pytest.approx(290, rel=0.1) and low < 300 < high
    assert low > 160, "earlier steps alone would predict no change since then"


def test_values_are_predicted_as_measured_if_the_run_does_not_drift() -> None:
    rng = np.random.default_rng(4)
    run = [stretch(name, {"a": 100.0, "b": 150.0}[name], rng) for name in "abababab"]
    low, likely, high = predict_again(run, "a")
    assert likely == pytest.approx(100, rel=0.03) and high - low < 20


@pytest.mark.parametrize("drift", [0.01, 0.05, 0.2])
def test_intervals_hold_nine_of_ten_whatever_the_drift(drift: float) -> None:
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        effects, level = dict(zip("abcd", rng.normal(0, 0.5, 4), strict=True)), 0.0
        run = []
        for name in [*"abcd", *rng.choice(list("abcd"), 8)]:
            level += drift * rng.standard_normal()
            run.append(stretch(name, 100 * np.exp(effects[name] + level), rng, noise=0.1))
        name = next(one for one in "abcd" if one != run[-1].values)
        after = stretch(name, 100 * np.exp(effects[name] + level + drift * rng.standard_normal()), rng, 0.1)
        low, _, high = predict_again(run, name)
        held += low <= after.times.mean <= high
    assert 0.84 <= held / 200 <= 0.99
