"""Predicts how many (token, expert) pairs a capacity drops, from the load of experts that a run measured.

A capacity factor f limits an expert to c = ceil(f S K / E) pairs of each sequence of S tokens, of which each chooses K
of E experts (Switch Transformer, arXiv 2101.03961, section 2.2). A step tells only the load of an expert over all its
sequences. The pairs of one sequence are taken as normal around the mean, with `overdispersion` times the standard
deviation of independent choices: tokens of one sequence choose alike.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

INDEPENDENT, ALIKE = 1.0, 4.0
"""Overdispersion where tokens choose independently, and where they choose alike: the interval of what is assumed."""

_NORMAL = NormalDist()


def capacity(factor: float, seq_len: int, top_k: int, experts: int) -> int:
    """Pairs that an expert takes of a sequence."""
    return min(seq_len, math.ceil(factor * seq_len * top_k / experts))


def expected_drops(
    loads: Sequence[Sequence[int]], sequences: float, most: int, overdispersion: float, seq_len: int
) -> float:
    """Dropped pairs of a step. `loads[layer][expert]` are pairs of a step; `most`: the capacity."""
    return sum(
        sequences * _excess(load / sequences, most, overdispersion, seq_len)
        for layer in loads
        for load in layer
        if load
    )


def _excess(mean: float, most: int, overdispersion: float, seq_len: int) -> float:
    """Expected pairs above `most` of a sequence: the mean of the positive part of a normal variable."""
    share = min(1.0, mean / seq_len)
    deviation = overdispersion * math.sqrt(max(1e-12, mean * (1 - share)))
    above = (mean - most) / deviation
    expected = (mean - most) * _NORMAL.cdf(above) + deviation * _NORMAL.pdf(above)
    return min(max(0.0, expected), max(0.0, float(seq_len - most)))


def matching_overdispersion(
    loads: Sequence[Sequence[int]], sequences: float, most: int, dropped: float, seq_len: int
) -> float:
    """The overdispersion at which `dropped` pairs are expected, found by bisection between both limits."""
    low, high = INDEPENDENT / 2, 2 * ALIKE
    for _ in range(30):
        middle = (low + high) / 2
        if expected_drops(loads, sequences, most, middle, seq_len) < dropped:
            low = middle
        else:
            high = middle
    return (low + high) / 2
