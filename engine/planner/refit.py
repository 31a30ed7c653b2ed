"""Calibrates the planner's step time to a run: fits three coefficients to the measured steps of the run.

The predicted time of a step is the sum of computation time C and communication time X. The fit replaces this sum by
a C + b X + o: factor a scales computation, factor b scales communication, and o is the time in seconds that the planner
does not predict, such as host work. Each set of knob values gives up to three equations: for the step, for its exposed
collectives, and for the time outside the pipeline. Each equation is divided by the standard error of its measurement,
so that accurate measurements count more. The values of a, b and o are the non-negative least-squares solution of these
equations.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from engine.planner.timing.step import Prediction

EXCHANGES = ("tp", "cp", "ep")  # phases of a prediction that are collectives inside pipeline actions
NOISE = 0.02  # minimum relative error of a mean step time
NOISE_OF_PARTS = 0.15  # error of parts of a step, over the step time: exposed time includes waiting
TIE = 1e-4  # weight of the equations b = a and o = 0, for measurements that do not determine b and o
UNCOUNTED = 0.03  # standard error of the effects of a change that the planner omits, over the step time
LEAST_RATIO = 0.01  # minimum predicted step time after a change, relative to that before
LIKELY = 1.645  # half of a 90 % interval, in standard errors


class Parts(NamedTuple):
    """The predicted time of a step in seconds, split into the terms of the fit. `compute` and `exchange`: the time that
    the slowest rank's pipeline actions spend in computation and in communication. `stretch`: factor by which the bubble
    extends the time of the actions. `sends`: exposed time of sends between pipeline stages. `outside_compute` and
    `outside_exchange`: computation and communication outside the pipeline, once per step."""

    compute: float
    exchange: float
    stretch: float = 1.0
    sends: float = 0.0
    outside_compute: float = 0.0
    outside_exchange: float = 0.0

    @property
    def row(self) -> tuple[float, float, float]:
        """The step time's row in the matrix of the fit: seconds of computation (column a), seconds of communication
        (column b), and 1 (column o)."""
        compute = self.stretch * self.compute + self.outside_compute
        exchange = self.stretch * self.exchange + self.sends + self.outside_exchange
        return compute, exchange, 1.0


def parts_of(prediction: Prediction) -> Parts:
    """The times of a predicted step, summed into the terms of the fit."""
    phases = dict(prediction.phases)
    bubble, dp, sends = (phases.pop(cause, 0.0) for cause in ("bubble", "dp", "pp"))
    optimizer = phases.pop("optimizer", 0.0)
    exchange = sum(phases.pop(axis, 0.0) for axis in EXCHANGES)
    compute = sum(phases.values())
    busy = compute + exchange
    return Parts(compute, exchange, 1 + bubble / busy if busy else 1.0, sends, optimizer, dp)


class Observed(NamedTuple):
    """Measurements of steps with one set of knob values. `step_s`: mean seconds of a step. `error_s`: standard error of
    `step_s`. `exchange_s`: seconds in exposed collectives; None: not measured. `outside_s`: seconds of the step outside
    its pipeline, such as in the optimizer; None: not measured."""

    parts: Parts
    step_s: float
    error_s: float = 0.0
    exchange_s: float | None = None
    outside_s: float | None = None


@dataclass(frozen=True)
class Factors:
    """The fitted factors. `residual`: relative root mean square error of the fitted step times. `settings`: number of
    different sets of knob values under which the fitted steps ran."""

    compute: float
    exchange: float
    overhead_s: float
    residual: float
    settings: int

    def seconds(self, parts: Parts) -> float:
        """The time of a step in seconds according to the fit."""
        compute, exchange, once = parts.row
        return self.compute * compute + self.exchange * exchange + self.overhead_s * once


def fit(observed: Sequence[Observed]) -> Factors | None:
    """Fit the factors to the measured steps of a run. Returns None if no step was measured."""
    rows: list[tuple[float, float, float]] = []
    values: list[float] = []
    for one in observed:
        for row, value, error in _equations(one):
            rows.append((row[0] / error, row[1] / error, row[2] / error))
            values.append(value / error)
    if not rows:
        return None
    scale = max(row[0] for row in rows)
    ties = [(-TIE * scale, TIE * scale, 0.0), (0.0, 0.0, TIE * scale)]
    a, b, o = _non_negative([*rows, *ties], [*values, 0.0, 0.0])
    factors = Factors(a, b, o, 0.0, len(observed))
    misses = [factors.seconds(one.parts) / one.step_s - 1 for one in observed]
    return Factors(a, b, o, float(np.sqrt(np.mean(np.square(misses)))), len(observed))


def _equations(one: Observed) -> Iterable[tuple[tuple[float, float, float], float, float]]:
    """The equations that one set of measurements adds to the fit: for each, the coefficients of a, b and o, the
    measured seconds, and their standard error."""
    parts = one.parts
    yield parts.row, one.step_s, max(NOISE * one.step_s, one.error_s)
    part_error = NOISE_OF_PARTS * one.step_s
    if one.exchange_s is not None and parts.exchange + parts.outside_exchange > 0:
        yield (0.0, parts.exchange + parts.outside_exchange, 0.0), one.exchange_s, part_error
    if one.outside_s is not None:
        yield (parts.outside_compute, parts.outside_exchange, 1.0), one.outside_s, part_error


def _non_negative(
    rows: Sequence[tuple[float, float, float]], values: Sequence[float]
) -> tuple[float, float, float]:
    """Non-negative least squares with three unknowns: solves for every non-empty subset of the unknowns, with the
    others fixed at zero, and returns the best solution that has no negative value."""
    matrix, right = np.array(rows), np.array(values)
    best, least = np.zeros(3), float(right @ right)
    for count in (3, 2, 1):
        for free in combinations(range(3), count):
            found = np.zeros(3)
            found[list(free)] = np.linalg.lstsq(matrix[:, free], right, rcond=None)[0]
            left = matrix @ found - right
            if (found >= 0).all() and float(left @ left) < least:
                best, least = found, float(left @ left)
    a, b, o = best.tolist()
    return a, b, o


def interval(now: float, change: float, noise: float, residual: float, error_of_change: float) -> "Span":
    """The predicted value after a change, `now` plus `change`, with its interval. `noise`: standard error of the
    difference between the measurements before and after the change (`Times.noise`). `residual`: relative error of the
    fit. `error_of_change`: standard error of predicted changes, relative to the change. The interval is symmetric in
    the logarithm of the step time: a prediction that is a factor of two too high is as wrong as one that is a factor of
    two too low."""
    after = max(now + change, LEAST_RATIO * now)
    if after <= 0:
        return Span(0.0, 0.0, 0.0)
    ratio = float(np.log(after / now))
    wrong = (noise / now, residual * min(1.0, abs(ratio)), UNCOUNTED, error_of_change * ratio)
    reach = float(np.exp(LIKELY * np.sqrt(sum(part**2 for part in wrong))))
    return Span(after / reach, after, after * reach)


class Span(NamedTuple):
    """A predicted value with its 90 % interval."""

    low: float
    likely: float
    high: float
