"""Predicts how many (token, expert) pairs a capacity limit drops, from the measured load of the experts.

A capacity limits the number of pairs of an expert per sequence (`engine.config.sizes.expert_capacity`). A run reports
only the load of each expert summed over all sequences of a step. The number of tokens of a sequence that are routed to
one expert is assumed to be normally distributed around its mean over the sequences. The standard deviation is
`overdispersion` times the value for tokens that choose independently, because tokens of one sequence tend to choose the
same experts.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

INDEPENDENT, ALIKE = 1.0, 4.0
"""Overdispersion if tokens of a sequence choose independently, and if they tend to choose the same experts.
Without a measurement, the overdispersion is assumed to be between these values.
"""

_NORMAL = NormalDist()


def expected_drops(
    loads: Sequence[Sequence[int]], sequences: float, most: int, overdispersion: float, seq_len: int
) -> float:
    """Expected number of dropped (token, expert) pairs in a step. `loads[layer][expert]`: pairs in a step; `most`: the
    capacity."""
    return sum(
        sequences * _excess(load / sequences, most, overdispersion, seq_len)
        for layer in loads
        for load in layer
        if load
    )


def _excess(mean: float, most: int, overdispersion: float, seq_len: int) -> float:
    """Expected number of an expert's (token, expert) pairs beyond the capacity `most` in a sequence: the mean of
    max(0, X - most), where X is the normally distributed number of pairs."""
    share = min(1.0, mean / seq_len)
    deviation = overdispersion * math.sqrt(max(1e-12, mean * (1 - share)))
    above = (mean - most) / deviation
    expected = (mean - most) * _NORMAL.cdf(above) + deviation * _NORMAL.pdf(above)
    return min(max(0.0, expected), max(0.0, float(seq_len - most)))


def matching_overdispersion(
    loads: Sequence[Sequence[int]], sequences: float, most: int, dropped: float, seq_len: int
) -> float:
    """The overdispersion at which the expected number of dropped (token, expert) pairs is `dropped`, found by
    bisection."""
    low, high = INDEPENDENT / 2, 2 * ALIKE
    for _ in range(30):
        middle = (low + high) / 2
        if expected_drops(loads, sequences, most, middle, seq_len) < dropped:
            low = middle
        else:
            high = middle
    return (low + high) / 2
