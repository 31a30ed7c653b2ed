"""Fits a linear model of the time that a step spends in an axis's collectives: ms = rest + alpha x micro-batches + beta
x bytes.

A sample is one step: the bytes that a rank sends over the axis, and the time that it spends in the axis's collectives,
both as means over ranks. Over most axes, ranks exchange data in each micro-batch, so alpha is the time to start the
collectives of one micro-batch. Alpha can be fitted only if the number of micro-batches differs between steps, and beta
only if the bytes differ. The rest is the time that neither of these terms explains, mainly waiting for other ranks. The
uncertainty is a jackknife estimate over blocks of consecutive steps, because the noise of neighbouring steps is
correlated. The 90 % interval of a fitted value is wide if only few steps determine the value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agents.protocol import Summary
from cockpit.data import format
from cockpit.data.store import Store

LIKELY = 1.645  # half of a 90 % interval, in standard errors
FEWEST = 20  # minimum number of samples for a fit
BLOCKS = 10  # number of blocks of the jackknife
SPREAD = 0.05  # minimum range of the bytes, relative to their mean, for which beta is fitted
OUTLIER = 4.0  # residuals beyond this many robust standard deviations are left out
NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
COLLINEAR = 1e-6  # smallest pivot over its own column
EVERY = 4  # steps between two fits
NOT_FITTED = {
    "pp": "its time is waiting for other stages",
    "control": "its messages are too small",
}

Row = tuple[float, ...]
"""The values of a sample in the columns (1, and each quantity that varied), then its ms."""


class Sample(NamedTuple):
    """One axis in one step: bytes and ms in collectives, as means over ranks, and the number of micro-batches (0:
    unknown)."""

    bytes: float
    ms: float
    micro_batches: int


class Known(NamedTuple):
    """A fitted value and half the width of its 90 % interval."""

    value: float
    reach: float

    @property
    def clear(self) -> bool:
        """Whether the whole 90 % interval is above zero."""
        return self.value - self.reach > 0


@dataclass(frozen=True)
class Fit:
    """The fitted model of the time that a step spends in the collectives of one axis. `start_ms`: the time in ms to
    start the collectives of one micro-batch (alpha); None if the number of micro-batches did not vary, or is unknown
    for a step. `ms_per_byte`: ms per byte that a rank sends; None if the bytes did not vary enough. `spread`: range of
    the bytes divided by their mean."""

    samples: int
    left_out: int
    spread: float
    rest_ms: Known
    start_ms: Known | None
    ms_per_byte: Known | None


@dataclass(frozen=True)
class NoFit:
    """The reason why no model was fitted for an axis."""

    why: str


def samples_of(summaries: Sequence[Summary], axis: str, world: int) -> list[Sample]:
    """The samples of an axis, one for each step of `summaries` in which it had traffic, oldest first."""
    found = []
    for summary in summaries:
        traffic = summary.comm.get(axis)
        if traffic and traffic.bytes and traffic.ms > 0 and world:
            micro = summary.knobs.get("micro_batches")
            count = micro if isinstance(micro, int) and not isinstance(micro, bool) else 0
            found.append(Sample(traffic.bytes / world, traffic.ms, count))
    return found


def fits(store: Store, axes: Sequence[str]) -> dict[str, Fit | NoFit]:
    """For each axis, the model fitted to the steps whose summaries the client still has; recomputed every few steps."""
    newest = store.summary.step // EVERY if store.summary else -1
    summaries = store.state.summaries

    def compute() -> dict[str, Fit | NoFit]:
        return {
            axis: NoFit(NOT_FITTED[axis])
            if axis in NOT_FITTED
            else fit(samples_of(summaries, axis, store.world))
            for axis in axes
        }

    first = summaries[0].step if summaries else -1
    return store.once("traffic fits", (), compute, also=(newest, first, tuple(axes), store.world))


def fit(samples: Sequence[Sample]) -> Fit | NoFit:
    """Fit the model to the bytes and times of one axis."""
    if len(samples) < FEWEST:
        return NoFit(f"{len(samples)} of the {FEWEST} steps that a fit needs")
    sizes = [sample.bytes for sample in samples]
    counts = {sample.micro_batches for sample in samples}
    mean = sum(sizes) / len(sizes)
    spread = (max(sizes) - min(sizes)) / mean
    starts, transfers = len(counts) > 1 and 0 not in counts, spread >= SPREAD
    if not starts and not transfers:
        stay = f", micro-batches stay {counts.pop()}" if 0 not in counts else ""
        return NoFit(f"not enough variation: {varied_text(spread)}{stay}")
    rows: list[Row] = [
        (1.0, *[float(one.micro_batches)] * starts, *[one.bytes / mean] * transfers, one.ms)
        for one in samples
    ]
    first = _solve(rows)
    if first is None:
        return NoFit("not enough variation: bytes and micro-batches vary together")
    kept = _without_outliers(rows, first)
    found = _solve(kept)
    size = -(-len(kept) // BLOCKS)
    blocks = [_solve(kept[:at] + kept[at + size :]) for at in range(0, len(kept), size)]
    parts = [block for block in blocks if block is not None]
    if found is None or len(parts) < len(blocks):
        return NoFit("not enough variation: few steps decide the fit")
    known = [
        Known(value, LIKELY * _jackknife([part[at] for part in parts])) for at, value in enumerate(found)
    ]
    slope = known[-1]
    return Fit(
        len(kept),
        len(rows) - len(kept),
        spread,
        known[0],
        known[1] if starts else None,
        Known(slope.value / mean, slope.reach / mean) if transfers else None,
    )


def varied_text(spread: float) -> str:
    """A phrase that says how much the bytes per step vary. `spread`: the range of the bytes divided by their mean."""
    return "bytes do not vary" if spread < 5e-4 else f"bytes vary by {format.percent(spread, 1).strip()}"


def _solve(rows: Sequence[Row]) -> list[float] | None:
    """Solve a least-squares problem; returns the coefficients of the columns, or None if a column is a linear
    combination of the others.
    """
    count = len(rows[0]) - 1
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(count + 1)] for i in range(count)]
    scale = [matrix[i][i] for i in range(count)]
    for i in range(count):  # Gaussian elimination; the matrix is positive definite, so pivots need no search
        if matrix[i][i] <= COLLINEAR * scale[i]:
            return None
        for k in range(i + 1, count):
            factor = matrix[k][i] / matrix[i][i]
            matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    found = [0.0] * count
    for i in reversed(range(count)):
        known = sum(matrix[i][j] * found[j] for j in range(i + 1, count))
        found[i] = (matrix[i][count] - known) / matrix[i][i]
    return found


def _without_outliers(rows: Sequence[Row], factors: Sequence[float]) -> list[Row]:
    residuals = [abs(row[-1] - sum(f * x for f, x in zip(factors, row, strict=False))) for row in rows]
    scale = NORMAL * sorted(residuals)[len(residuals) // 2]
    if scale == 0.0:
        return list(rows)
    return [row for row, residual in zip(rows, residuals, strict=True) if residual <= OUTLIER * scale]


def _jackknife(values: Sequence[float]) -> float:
    """The jackknife standard error of a fitted coefficient. `values` are the estimates of the coefficient that result
    when each block in turn is left out."""
    mean = sum(values) / len(values)
    return math.sqrt((len(values) - 1) / len(values) * sum((value - mean) ** 2 for value in values))
