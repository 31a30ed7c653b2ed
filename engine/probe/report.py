"""The measurements of `engine collectives`, the fitted lines, and the fastest algorithm for each size. Torch-free."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from statistics import median
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from engine.planner.hardware.description import Hardware, MeasuredCollective, Measurement
from engine.planner.timing.costs import cost
from engine.planner.timing.measured import HIERARCHICAL, fastest
from engine.probe.line import Point, fit

RESULT = "collectives.json"  # file with rank 0's measurements, in a temporary folder
# Algorithms without one latency per message: torch's own is not known, and two levels of links have two latencies.
UNKNOWN_COST = ("torch", HIERARCHICAL)
RESAMPLED = 100  # samples of the bootstrap
QUANTILES = (0.05, 0.95)  # quantiles of its results
WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2}  # bytes of an element
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
ALL = "all of them"


Interval = tuple[float, float, float]
"""An estimate, and the ends of its 90 % interval."""


class Settings(Struct, frozen=True):
    """What to measure. `sizes`: sizes in bytes of the whole buffer, which is the output of an all-gather and the input
    of a reduction. `node`: number of ranks per node, for hierarchical algorithms; None: do not measure these.
    `algorithms`: algorithms to measure; empty: all."""

    ranks: int
    node: int | None = None
    kinds: tuple[str, ...] = ("all_reduce",)
    algorithms: tuple[str, ...] = ()
    sizes: tuple[int, ...] = tuple(2**n for n in range(10, 23, 2))
    dtype: str = "fp32"
    device: str = "auto"
    quick: bool = False

    @property
    def buffers(self) -> list[int]:
        """The measured buffer sizes. Each size is rounded up so that every rank has the same number of elements."""
        unit = WIDTHS[self.dtype] * self.ranks
        return sorted({-(-size // unit) * unit for size in self.sizes})


class Trial(NamedTuple):
    """A collective with one algorithm over a buffer of `size` bytes."""

    kind: str
    algorithm: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind.replace('_', '-')} {self.algorithm}, {self.size / 1024:g} KiB"


class Measured(Struct, frozen=True):
    """The measured times. `batches`: for each collective, the seconds per call in each batch of calls, on the slowest
    rank. `cores`: None on GPUs."""

    backend: str
    cores: int | None
    local_ranks: int
    batches: list[tuple[Trial, list[float]]]


class Time(Struct, frozen=True):
    """The measured seconds per call of a collective: the median over the batches of calls."""

    kind: str
    algorithm: str
    bytes: int
    seconds: float


class Fit(Struct, frozen=True):
    """A fitted line: n bytes take `latency_s` + n `per_byte_s` seconds. `alpha_s` and `beta_s`: seconds per message and
    per byte sent; None if it is not known how many messages and bytes the algorithm sends. With the algorithm `ALL`,
    one alpha and one beta are fitted to all algorithms whose number of messages is known. `error`: median relative
    deviation of the measured times from the line."""

    kind: str
    algorithm: str
    latency_s: Interval | None
    per_byte_s: Interval | None
    alpha_s: Interval | None
    beta_s: Interval | None
    error: float


class Band(Struct, frozen=True):
    """The algorithm with the fastest fitted line from `from_bytes` to `to_bytes` (None: no upper limit)."""

    kind: str
    algorithm: str
    from_bytes: int
    to_bytes: int | None


class Report(Struct, frozen=True):
    """Everything that `engine collectives` prints as text or with `--json`."""

    ranks: int
    node: int | None
    dtype: str
    backend: str
    cores: int | None
    oversubscribed: bool
    times: list[Time]
    fits: list[Fit]
    chosen: list[Band]


class Series(NamedTuple):
    """The measured seconds per call of one collective algorithm: for each buffer size in bytes, one value for each
    batch of calls. `steps`: number of messages that the algorithm sends one after another. `sent`: total bytes of these
    messages, as a multiple of the buffer size."""

    batches: Mapping[int, Sequence[float]]
    steps: float = 1.0
    sent: float = 1.0

    def points(self, middle: Callable[[Sequence[float]], float]) -> list[Point]:
        """For each buffer size, the bytes and the seconds of one message. Each size was timed in several batches of
        calls; `middle` reduces their times to a single value, for example the median. A line fitted to these points has
        the same relative error as a line fitted to the times of whole collectives."""
        return [
            (size * self.sent / self.steps, middle(seconds) / self.steps)
            for size, seconds in self.batches.items()
        ]


def report(settings: Settings, measured: Measured) -> tuple[Report, tuple[MeasuredCollective, ...]]:
    """The report that `engine collectives` prints, and the fitted lines as rows for a hardware description, which the
    planner reads."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for trial, seconds in measured.batches:
        found.setdefault((trial.kind, trial.algorithm), {})[trial.size] = seconds
    fits = [_fit(kind, name, settings.ranks, batches) for (kind, name), batches in found.items()]
    for kind in settings.kinds:
        known = [
            Series(batches, *cost(kind, name, settings.ranks)[:2])
            for (of, name), batches in found.items()
            if of == kind and name not in UNKNOWN_COST
        ]
        if known:
            alpha, beta, error = _fitted(known)
            fits.append(Fit(kind, ALL, None, None, alpha, beta, error))
    rows = tuple(_row(fit, settings) for fit in fits if fit.algorithm != ALL)
    whole = Report(
        settings.ranks,
        settings.node,
        settings.dtype,
        measured.backend,
        measured.cores,
        measured.cores is not None and measured.local_ranks > measured.cores,
        [
            Time(kind, name, size, median(seconds))
            for (kind, name), batches in found.items()
            for size, seconds in batches.items()
        ],
        fits,
        [band for kind in settings.kinds for band in _bands([row for row in rows if row.kind == kind])],
    )
    return whole, rows


def _fit(kind: str, name: str, ranks: int, batches: Mapping[int, Sequence[float]]) -> Fit:
    latency, slope, error = _fitted([Series(batches)])
    if name in UNKNOWN_COST:
        return Fit(kind, name, latency, slope, None, None, error)
    steps, sent, _ = cost(kind, name, ranks)
    return Fit(kind, name, latency, slope, _over(latency, steps), _over(slope, sent), error)


def _over(interval: Interval, divisor: float) -> Interval:
    middle, low, high = (number / divisor for number in interval)
    return middle, low, high


def _fitted(series: Sequence[Series]) -> tuple[Interval, Interval, float]:
    """Latency and seconds per byte with their intervals, and the error of the fitted line. The bootstrap resamples the
    batches of each size (Efron and Tibshirani 1993, chapter 6), so the intervals reflect the measurement noise. The
    error is the median relative deviation of the measured times from the line."""
    line = fit([point for one in series for point in one.points(median)])
    random = Random(0)  # equal times give equal intervals

    def redrawn(seconds: Sequence[float]) -> float:
        return median(random.choices(seconds, k=len(seconds)))

    drawn = [fit([point for one in series for point in one.points(redrawn)]) for _ in range(RESAMPLED)]
    latency, slope = ([getattr(one, name) for one in drawn] for name in ("latency", "slope"))
    return _interval(line.latency, latency), _interval(line.slope, slope), line.error


def _interval(estimate: float, drawn: Sequence[float]) -> Interval:
    """The estimate and its interval, which is bounded by quantiles of the resampled estimates. The interval is extended
    to contain the estimate itself, in case noise moves all resampled estimates to one side."""
    low, high = (sorted(drawn)[round(quantile * (len(drawn) - 1))] for quantile in QUANTILES)
    return estimate, min(low, estimate), max(high, estimate)


def _row(fit: Fit, settings: Settings) -> MeasuredCollective:
    assert fit.latency_s and fit.per_byte_s
    return MeasuredCollective(
        axis="world",
        kind=fit.kind,
        algorithm=fit.algorithm,
        ranks=settings.ranks,
        latency=fit.latency_s[0],
        per_byte=fit.per_byte_s[0],
        error=fit.error,
        node=settings.node if fit.algorithm == HIERARCHICAL else None,
    )


def _bands(rows: Sequence[MeasuredCollective]) -> Iterator[Band]:
    start = 0
    for row in fastest(rows):
        yield Band(row.kind, row.algorithm, start, row.most_bytes)
        start = row.most_bytes or start


def added(hardware: Hardware, found: Report, rows: Sequence[MeasuredCollective]) -> Hardware:
    """The hardware description with `rows` added; they replace earlier rows for the same collective and the same group
    of ranks."""
    measured = hardware.measured or Measurement(ranks=found.ranks, cores=found.cores, backend=found.backend)
    new = {(row.kind, row.ranks, row.stride) for row in rows}
    kept = [row for row in measured.algorithms if (row.kind, row.ranks, row.stride) not in new]
    return replace(hardware, measured=replace(measured, algorithms=(*kept, *rows)))
