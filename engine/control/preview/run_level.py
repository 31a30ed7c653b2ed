"""Predicts the step time of a run for knob values that were in force earlier in the run.

A run can become faster or slower even if its knobs stay the same, because the load of its experts changes or because
other processes compete for the CPU. So an earlier step time with the same knob values is not a good prediction. The
model used here describes the logarithm of a step time as the sum of a baseline, which changes during the run, and a
constant effect of the knob values. The baseline is a random walk: from one stretch of steps with equal knob values to
the next, the baseline changes by a random amount, whose standard deviation is called the drift. If the same knob values
were in force several times, their step times show how far the baseline has moved in between. The drift is unknown, so
the step time is predicted for several values of the drift, and the predictions are averaged, weighted with the
probability of each value.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from engine.planner.measured import Times
from engine.planner.refit import LIKELY, NOISE, Span

DRIFTS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)  # relative to the step time
USUAL_DRIFT, FACTOR = 0.03, 2.5  # median of the prior distribution of the drift, and its standard deviation
ANY_STEP_TIME = 10.0  # standard deviation of the logarithm of a step time before any is measured
ANY_EFFECT = 1.0  # the same for the effect of knob values


class Stretch(NamedTuple):
    """At least two consecutive steps with equal knob values."""

    values: Hashable
    times: Times


def predict_again(stretches: Sequence[Stretch], values: Hashable) -> Span:
    """Predict the mean time of the next steps in seconds, with a 90 % interval, if these steps run with the knob values
    `values`. `stretches`: the step times so far, in chronological order, one entry for each series of at least two
    consecutive steps with equal knob values."""
    logs = np.log([one.times.mean for one in stretches])
    errors = np.array([max(NOISE, one.times.error / one.times.mean) for one in stretches])
    of = [*(one.values for one in stretches), values]
    same = np.array([[a == b for b in of] for a in of])
    place = np.arange(len(of))
    moves = np.minimum(place[:, None], place[None, :])  # moves of the level that two stretches have in common
    fixed = ANY_STEP_TIME**2 + ANY_EFFECT**2 * same
    found = [_conditional(fixed + drift**2 * moves, logs - logs.mean(), errors) for drift in DRIFTS]
    weights = np.array([one.log_likelihood for one in found])
    weights -= (np.log(np.array(DRIFTS) / USUAL_DRIFT) / np.log(FACTOR)) ** 2 / 2
    weights = np.exp(weights - weights.max())
    weights /= weights.sum()
    means, variances = (np.array(column) for column in list(zip(*found, strict=True))[:2])
    mean = float(weights @ means)
    variance = float(weights @ (variances + (means - mean) ** 2)) + float(np.median(errors)) ** 2
    reach = LIKELY * variance**0.5
    likely = logs.mean() + mean
    return Span(*(float(np.exp(likely + by)) for by in (-reach, 0.0, reach)))


class _Normal(NamedTuple):
    mean: float
    variance: float
    log_likelihood: float  # of the measured values, without a constant


def _conditional(covariance: np.ndarray, measured: np.ndarray, errors: np.ndarray) -> _Normal:
    """For several jointly normal variables, the conditional distribution of the last one, given noisy measurements of
    the others."""
    known = covariance[:-1, :-1] + np.diag(errors**2)
    solved = np.linalg.solve(known, np.column_stack([measured, covariance[:-1, -1]]))
    mean, reduced = covariance[-1, :-1] @ solved
    fit = measured @ solved[:, 0] + np.linalg.slogdet(known)[1]
    return _Normal(float(mean), float(covariance[-1, -1] - reduced), -float(fit) / 2)
