"""Fits the cost of an axis to a run's own steps: time = starts x alpha + bytes x beta. Textual-free.

A sample is one step: the bytes that a mean rank sends over the axis, and its time in collectives. If the number of
micro-batches varied, starts are micro-batches, because an axis that exchanges data in each micro-batch starts its
collectives once per micro-batch; otherwise starts are steps, and alpha is what the bytes do not explain. The
uncertainty is a jackknife over blocks of consecutive steps, because neighbouring steps have similar disturbances: it is
wide where few steps or one disturbance decide the fit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agents.protocol import Summary
from cockpit.data import format
from cockpit.data.store import Store

LIKELY = 1.645  # half of a 90 % interval, in standard errors
FEWEST = 20  # samples of a fit
BLOCKS = 10  # of the jackknife
SPREAD = 0.05  # range of the bytes over their mean from which a fit is tried
OUTLIER = 4.0  # residuals beyond this many robust standard deviations are left out
NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
EACH_MICRO_BATCH = frozenset({"tp", "ep", "cp"})
NOT_TRANSFER = {"pp": "its time is waiting for other stages", "control": "its messages are too small"}


class Sample(NamedTuple):
    """One step of an axis: bytes of the mean rank, mean ms in collectives, micro-batches (0: unknown)."""

    bytes: float
    ms: float
    micro_batches: int


class Known(NamedTuple):
    """A fitted value and half of its 90 % interval."""

    value: float
    reach: float

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero and negative values."""
        return self.value - self.reach > 0


@dataclass(frozen=True)
class Fit:
    """`start_ms`: ms per micro-batch or, if not `per_micro_batch`, per step. `ms_per_byte`: of one rank."""

    samples: int
    left_out: int
    per_micro_batch: bool
    start_ms: Known
    ms_per_byte: Known

    @property
    def bytes_per_s(self) -> tuple[float, float | None, float]:
        """Fitted bandwidth of a rank, with the low and the high end of its interval: (low, high or None, likely)."""
        beta, reach = self.ms_per_byte
        high = 1e3 / (beta - reach) if beta > reach else None
        return 1e3 / (beta + reach), high, 1e3 / beta


@dataclass(frozen=True)
class NoFit:
    """Why there is no fit."""

    why: str


def samples_of(summaries: Sequence[Summary], axis: str, world: int) -> list[Sample]:
    """The samples of an axis, oldest first."""
    found = []
    for summary in summaries:
        traffic = summary.comm.get(axis)
        if traffic and traffic.bytes and traffic.ms > 0 and world:
            micro = summary.knobs.get("micro_batches")
            count = micro if isinstance(micro, int) and not isinstance(micro, bool) else 0
            found.append(Sample(traffic.bytes / world, traffic.ms, count))
    return found


def fits(store: Store, axes: Sequence[str]) -> dict[str, Fit | NoFit]:
    """The fit of each axis over the steps that the state keeps whole; computed again every fourth step."""
    newest = store.summary.step // 4 if store.summary else -1
    summaries = store.state.summaries

    def compute() -> dict[str, Fit | NoFit]:
        return {
            axis: NoFit(NOT_TRANSFER[axis])
            if axis in NOT_TRANSFER
            else fit(samples_of(summaries, axis, store.world), axis in EACH_MICRO_BATCH)
            for axis in axes
        }

    return store.once("traffic fits", (), compute, also=(newest, len(summaries), tuple(axes), store.world))


def fit(samples: Sequence[Sample], each_micro_batch: bool) -> Fit | NoFit:
    """Fit the samples of one axis. `each_micro_batch`: the axis exchanges data in each micro-batch."""
    if len(samples) < FEWEST:
        return NoFit(f"{len(samples)} steps: a fit takes {FEWEST}")
    starts = {sample.micro_batches for sample in samples}
    per_micro = each_micro_batch and len(starts) > 1 and 0 not in starts
    sizes = [sample.bytes for sample in samples]
    mean = sum(sizes) / len(sizes)
    spread = (max(sizes) - min(sizes)) / mean
    if spread < SPREAD and not per_micro:
        varied = format.percent(spread, 1)
        return NoFit(
            f"not enough variation: bytes vary by {varied} over {format.grouped(len(samples))} steps"
        )
    rows = [(sample.micro_batches if per_micro else 1, sample.bytes / mean, sample.ms) for sample in samples]
    first = _solve(rows)
    if first is None:
        return NoFit("not enough variation: bytes and micro-batches vary together")
    kept = _without_outliers(rows, first)
    found = _solve(kept)
    size = -(-len(kept) // BLOCKS)
    blocks = [_solve(kept[:at] + kept[at + size :]) for at in range(0, len(kept), size)]
    known = [block for block in blocks if block is not None]
    if found is None or len(known) < len(blocks):
        return NoFit("not enough variation: few steps decide the fit")
    start, slope = (Known(found[i], LIKELY * _jackknife([block[i] for block in known])) for i in (0, 1))
    if not slope.clear:
        ends = f"{slope.value - slope.reach:.2g} to {slope.value + slope.reach:.2g} ms"
        return NoFit(f"no clear dependence on bytes: {ends} for the bytes of a step")
    return Fit(
        len(kept), len(rows) - len(kept), per_micro, start, Known(slope.value / mean, slope.reach / mean)
    )


Row = tuple[float, float, float]  # starts, bytes over their mean, ms


def _solve(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Least squares of ms = a starts + b bytes; None if starts and bytes are proportional."""
    ss = sb = bb = sy = by = 0.0
    for s, b, y in rows:
        ss += s * s
        sb += s * b
        bb += b * b
        sy += s * y
        by += b * y
    determinant = ss * bb - sb * sb
    if determinant <= 1e-6 * ss * bb:
        return None
    return (sy * bb - by * sb) / determinant, (by * ss - sy * sb) / determinant


def _without_outliers(rows: Sequence[Row], line: tuple[float, float]) -> list[Row]:
    residuals = [abs(y - line[0] * s - line[1] * b) for s, b, y in rows]
    scale = NORMAL * sorted(residuals)[len(residuals) // 2]
    if scale == 0.0:
        return list(rows)
    return [row for row, residual in zip(rows, residuals, strict=True) if residual <= OUTLIER * scale]


def _jackknife(values: Sequence[float]) -> float:
    """Standard error from the values without each block."""
    mean = sum(values) / len(values)
    return math.sqrt((len(values) - 1) / len(values) * sum((value - mean) ** 2 for value in values))
