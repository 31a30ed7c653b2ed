"""Tests the fit of predicted step times to a run's measured steps: it recovers known factors, and gives intervals for
the effects of changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.refit import UNCOUNTED, Factors, Observed, Parts, fit, interval, parts_of
from engine.planner.timing.predict import predict
from engine.planner.workload.job import Job
from tests.unit.engine.simulate.simulated import machine, small

# Parts of a step for three settings of one run; more micro-batches give more collectives and a smaller bubble.
SETTINGS = [
    Parts(0.50, 0.04, 1.30, 0.004, 0.02, 0.03),
    Parts(0.51, 0.08, 1.15, 0.008, 0.02, 0.03),
    Parts(0.70, 0.06, 1.30, 0.004, 0.02, 0.03),
]
TRUE = st.tuples(st.floats(0.2, 5), st.floats(0.2, 5), st.floats(0, 0.3))


@given(TRUE)
def test_known_factors_are_found_again_from_step_times_alone(true: tuple[float, float, float]) -> None:
    truth = Factors(*true, 0.0, 0)
    found = fit([Observed(parts, truth.seconds(parts), 1e-9) for parts in SETTINGS])
    assert found is not None and found.residual < 1e-3
    for parts in SETTINGS:
        assert found.seconds(parts) == pytest.approx(truth.seconds(parts), rel=2e-3)
    assert found.compute == pytest.approx(true[0], rel=0.05)


@given(TRUE)
def test_one_setting_is_enough_with_its_exchanges_and_what_lies_outside(
    true: tuple[float, float, float],
) -> None:
    a, b, o = true
    truth, parts = Factors(a, b, o, 0.0, 0), SETTINGS[0]
    exchange = b * (parts.exchange + parts.outside_exchange)
    outside = a * parts.outside_compute + b * parts.outside_exchange + o
    found = fit([Observed(parts, truth.seconds(parts), 0.0, exchange, outside)])
    assert found is not None
    assert (found.compute, found.exchange) == (pytest.approx(a, rel=0.1), pytest.approx(b, rel=0.1))
    assert found.overhead_s == pytest.approx(o, abs=0.02 * truth.seconds(parts))


def test_what_cannot_be_told_apart_is_computation() -> None:
    alone = Parts(0.5, 0.0)
    found = fit([Observed(alone, 1.0)])
    assert found is not None and found.compute == pytest.approx(2.0, rel=0.01), (
        "the seconds must count as computation"
    )
    assert found.exchange == pytest.approx(2.0, rel=0.01)


def test_no_factor_is_negative() -> None:
    # The step with more collectives is faster, which only a negative cost of collectives would explain.
    found = fit([Observed(SETTINGS[0], 1.0), Observed(SETTINGS[1]._replace(compute=0.5), 0.7)])
    assert found is not None and min(found.compute, found.exchange, found.overhead_s) >= 0
    assert found.residual > 0.02, "the residual must show what the fit does not explain"


def test_without_a_step_there_is_no_fit() -> None:
    assert fit([]) is None


def test_the_parts_of_a_prediction_are_all_of_it() -> None:
    prediction = predict(Job.of(small()), machine())
    as_planned = Factors(1.0, 1.0, 0.0, 0.0, 1)
    assert as_planned.seconds(parts_of(prediction)) == pytest.approx(prediction.step_s[1])


def test_an_interval_grows_with_the_change_and_with_what_is_unknown() -> None:
    small_, large = interval(1.0, 0.1, 0.01, 0.0, 0.5), interval(1.0, 0.5, 0.01, 0.0, 0.5)
    assert small_.likely == pytest.approx(1.1) and large.likely == pytest.approx(1.5)
    assert large.high - large.low > small_.high - small_.low
    assert interval(1.0, 0.1, 0.01, 0.0, 0.1).low > small_.low, (
        "confirmed predictions must narrow the interval"
    )


def test_nine_of_ten_lie_inside_where_the_error_is_as_told() -> None:
    rng = np.random.default_rng(1)
    change, error = 0.3, 0.4
    span = interval(1.0, change, 0.02, 0.0, error)
    ratio = (1.0 + change) ** (1 + error * rng.standard_normal(4000))
    true = ratio * np.exp(0.02 * rng.standard_normal(4000) + UNCOUNTED * rng.standard_normal(4000))
    inside = np.mean((span.low <= true) & (true <= span.high))
    assert 0.88 < inside < 0.94
