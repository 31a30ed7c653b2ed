"""Fits the planner's efficiencies to the published rows and writes them down.

python -m tests.bench.plan_fit

Six numbers for each hardware generation and one factor for each framework release. They minimise the sum of Huber
losses of log(predicted / measured); a source of n rows weighs sqrt(n). The factor of a release multiplies the whole
step, so the best one follows from the residuals; the six are found by damped Gauss-Newton steps (Levenberg 1944, Marquardt
1963) on their logarithms.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log

import msgspec
import numpy as np
import numpy.typing as npt

from engine.planner.hardware.description import Efficiency
from engine.planner.timing.release import releases
from engine.planner.timing.step import predict
from tests.bench.plan_hardware import hardware
from tests.bench.published.rows import Row

Floats = npt.NDArray[np.float64]
NAMES = ("gemm", "half_rows", "attention", "memory", "link", "operation")
BOUNDS = {
    "gemm": (0.3, 0.98), "half_rows": (1.0, 2000.0), "attention": (0.05, 0.95), "memory": (0.2, 0.98),
    "link": (0.1, 1.0), "operation": (1e-7, 3e-4),
}  # fmt: skip
HUBER = 0.1  # of log(predicted / measured): beyond it a residual counts linearly
STEP = 0.03  # of a logarithm, for the derivative


@dataclass
class Fit:
    """Efficiency of a generation and factors of releases, with the rows that gave them."""

    efficiency: Efficiency
    factors: dict[str, float]
    rows: Sequence[Row] = field(default_factory=list)

    def factor(self, release: str) -> float:
        """The factor; of a release without rows, the geometric mean of the others."""
        if release in self.factors:
            return self.factors[release]
        known = [log(factor) for factor in self.factors.values()]
        return exp(sum(known) / len(known)) if known else 1.0

    def seconds(self, row: Row) -> float:
        return raw_seconds(row, self.efficiency) * self.factor(row.release)


def raw_seconds(row: Row, efficiency: Efficiency) -> float:
    """Predicted seconds with a factor of 1."""
    assert row.job
    traits = msgspec.structs.replace(releases()[row.release], factor=1.0)
    return predict(row.job, hardware(row.gpu, efficiency), traits).step_s[1]


def weights(rows: Sequence[Row]) -> Floats:
    counts: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.source] += 1
    return np.array([counts[row.source] ** -0.5 for row in rows])


def log_factors(rows: Sequence[Row], errors: Floats, weight: Floats) -> dict[str, float]:
    """The factors, as logarithms, that centre the errors of each release (a robust mean)."""
    found: dict[str, float] = {}
    for name in {row.release for row in rows}:
        mine = np.array([row.release == name for row in rows])
        e, w = errors[mine], weight[mine]
        centre = float(np.median(e))
        for _ in range(20):
            pull = w / np.maximum(1, np.abs(e - centre) / HUBER)
            centre = float((pull * e).sum() / pull.sum())
        found[name] = -centre
    return found


def fit(
    rows: Sequence[Row], start: Efficiency, rounds: int = 12, say: Callable[[str], object] = print
) -> Fit:
    """The efficiency and factors that fit `rows` of one generation best."""
    weight = weights(rows)
    measured = np.log([row.measured for row in rows])
    low, high = (np.log([BOUNDS[name][side] for name in NAMES]) for side in (0, 1))

    def residuals(x: Floats) -> Floats:
        efficiency = Efficiency(**dict(zip(NAMES, np.exp(x).tolist(), strict=True)))
        errors = np.log([raw_seconds(row, efficiency) for row in rows]) - measured
        centres = log_factors(rows, errors, weight)
        return errors + np.array([centres[row.release] for row in rows])

    def loss(e: Floats) -> float:
        a = np.abs(e)
        return float((weight * np.where(a < HUBER, a**2 / 2, HUBER * (a - HUBER / 2))).sum())

    x = np.clip(np.log([getattr(start, name) for name in NAMES]), low, high)
    e, damping = residuals(x), 1e-2
    best = loss(e)
    for _ in range(rounds):
        columns = []
        for n in range(len(NAMES)):
            step = STEP if x[n] + STEP <= high[n] else -STEP
            moved = x.copy()
            moved[n] += step
            columns.append((residuals(moved) - e) / step)
        jacobian = np.array(columns).T
        pull = weight / np.maximum(1, np.abs(e) / HUBER)
        normal, gradient = jacobian.T @ (pull[:, None] * jacobian), jacobian.T @ (pull * e)
        for _ in range(6):
            scale = damping * (np.diag(normal) + 1e-9 * np.trace(normal))
            candidate = np.clip(x - np.linalg.solve(normal + np.diag(scale), gradient), low, high)
            tried = residuals(candidate)
            if loss(tried) < best:
                damping /= 3
                break
            damping *= 4
        else:
            break
        gain, x, e = best - loss(tried), candidate, tried
        best -= gain
        say(f"  loss {best:.4f}  " + "  ".join(f"{k} {v:.4g}" for k, v in zip(NAMES, np.exp(x), strict=True)))
        if gain < 1e-4 * best:
            break
    efficiency = Efficiency(**dict(zip(NAMES, np.exp(x).tolist(), strict=True)))
    errors = np.log([raw_seconds(row, efficiency) for row in rows]) - measured
    return Fit(efficiency, {k: exp(v) for k, v in log_factors(rows, errors, weight).items()}, rows)
