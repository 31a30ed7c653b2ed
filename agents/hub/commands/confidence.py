"""Confidence interval for the ratio of the step time after a change to the step time before it.

Step times have a skewed distribution, so their logarithms are compared; a difference of logarithms corresponds to a
ratio. The times of neighbouring steps are correlated (another program may slow many steps in a row), so the steps
before the change, and those after it, are each divided into blocks of consecutive steps: at least `BATCHES` blocks, or
one block per step if there are fewer steps. The mean times of successive blocks are far less correlated than the times
of successive steps (method of batch means, Law and Carson 1979). The confidence interval for the difference of the two
means is that of Welch (1947).
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance
from typing import NamedTuple

BATCHES = 10
CONFIDENCE = 0.95
FEWEST = 4  # minimum number of values in a window


class Ratio(NamedTuple):
    """Step time after the change divided by step time before it, with the 95 % confidence interval."""

    ratio: float
    low: float
    high: float


def compared(before: Sequence[float], after: Sequence[float]) -> Ratio | None:
    """The geometric mean of the step times `after`, divided by that of `before`. None if one of them has fewer than
    `FEWEST` values or an invalid duration, or if the ratio overflows."""
    if min(len(before), len(after)) < FEWEST or not all(0 < t < math.inf for t in (*before, *after)):
        return None
    a, b = _batch_means(before), _batch_means(after)
    share = [variance(x) / len(x) for x in (a, b)]
    difference, error = fmean(b) - fmean(a), math.sqrt(sum(share))
    freedom = min(len(a), len(b)) - 1.0
    if error:
        freedom = sum(share) ** 2 / sum(s * s / (len(x) - 1) for s, x in zip(share, (a, b), strict=True))
    reach = student(0.5 + CONFIDENCE / 2, freedom) * error
    try:
        return Ratio(*(math.exp(difference + by) for by in (0.0, -reach, reach)))
    except OverflowError:
        return None


def typical(values: Sequence[float]) -> float | None:
    """The geometric mean; None if `values` is empty or not all values are positive."""
    return math.exp(fmean(map(math.log, values))) if values and min(values) > 0 else None


def student(share: float, freedom: float) -> float:
    """The quantile of Student's t-distribution at the probability `share`, computed with expansion 26.7.5 of Abramowitz
    and Stegun. The error is below 1 % for 3 or more degrees of freedom.
    """
    z, n = NormalDist().inv_cdf(share), freedom
    terms = (
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return z + sum(terms)


def _batch_means(times: Sequence[float]) -> list[float]:
    """For each block of steps, the mean of the logarithms of its step times. All blocks have the same size; the oldest
    steps, which do not fill a block, are omitted.
    """
    size = max(1, len(times) // BATCHES)
    logs = [math.log(t) for t in times[len(times) % size :]]
    return [fmean(logs[n : n + size]) for n in range(0, len(logs), size)]
