"""Costs of collective algorithms: number of messages, bytes sent, bytes reduced. `engine.collectives` implements most
of these algorithms.

Sources: Thakur, Rabenseifner and Gropp 2005 (doi 10.1177/1094342005051521), sections 4.1-4.5; Chan, Heimlich,
Purkayastha and van de Geijn 2007 (doi 10.1002/cpe.1206), tables I-III; and for NCCL's double tree, Sanders, Speck and
Traeff 2009 (doi 10.1016/j.parco.2009.09.001). Patarasu and Yuan 2009 (doi 10.1016/j.jpdc.2008.09.002) prove that in an
all-reduce a rank sends at least 2 (P-1)/P times the size of the buffer, and that a ring does not send more.

Recursive halving and doubling require that the number of ranks is a power of two. If P is not a power of two, only p
ranks run the algorithm, where p is the largest power of two below P. Before the algorithm starts, each remaining rank
sends its buffer to one of these p ranks; at the end, it receives the result from the same rank (Thakur et al. 2005,
section 4.5).
"""

from collections.abc import Callable
from math import ceil, log2
from typing import NamedTuple


class Cost(NamedTuple):
    """`steps`: number of messages on the critical path. `sent` and `reduced`: bytes sent and bytes reduced (added up)
    on this path, as multiples of the buffer size. If all ranks send the same number of bytes, each sends `sent` times
    the size of the buffer."""

    steps: float
    sent: float
    reduced: float = 0.0


Algorithm = Callable[[int], Cost]


def power_of_two(ranks: int) -> int:
    """The largest power of two that is at most `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def log(ranks: int) -> int:
    return ceil(log2(ranks)) if ranks > 1 else 0


def share_of_others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _halving_doubling(ranks: int) -> Cost:
    p = power_of_two(ranks)
    fold = 0 if p == ranks else 1
    return Cost(2 * (log(p) + fold), 2 * (share_of_others(p) + fold), share_of_others(p) + fold)


def _doubling_all_reduce(ranks: int) -> Cost:
    p = power_of_two(ranks)
    fold = 0 if p == ranks else 1
    return Cost(log(p) + 2 * fold, log(p) + 2 * fold, log(p) + fold)


def _doubling(ranks: int) -> Cost:
    """An all-gather by recursive doubling. If P is not a power of two, P - p of the p ranks first receive the input of
    a partner, so they begin with two blocks instead of one, and send larger messages. At the end, these P - p ranks
    send the whole buffer to their partners."""
    p = power_of_two(ranks)
    if p == ranks:
        return Cost(log(ranks), share_of_others(ranks))
    blocks = sum(min(2 ** (k + 1), 2**k + ranks - p) for k in range(log(p)))
    return Cost(log(p) + 2, 1 + (1 + blocks) / ranks)


def _halving(ranks: int) -> Cost:
    """A reduce-scatter by recursive halving, which is the reverse of an all-gather by recursive doubling."""
    steps, sent, _ = _doubling(ranks)
    return Cost(steps, sent, sent if power_of_two(ranks) == ranks else sent - 1 / ranks)


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "ring": lambda p: Cost(2 * (p - 1), 2 * share_of_others(p), share_of_others(p)),
        "halving-doubling": _halving_doubling,
        "doubling": _doubling_all_reduce,
        "double tree": lambda p: Cost(2 * log(p), 2.0 if p > 1 else 0.0, 1.0 if p > 1 else 0.0),
    },
    "all_gather": {"ring": lambda p: Cost(p - 1, share_of_others(p)), "doubling": _doubling},
    "reduce_scatter": {
        "ring": lambda p: Cost(p - 1, share_of_others(p), share_of_others(p)),
        "halving": _halving,
    },
    "all_to_all": {
        "direct": lambda p: Cost(p - 1, share_of_others(p)),
        "bruck": lambda p: Cost(log(p), log(p) / 2),
    },
    "send": {"direct": lambda p: Cost(1, 1)},
}
"""The algorithms among which the planner chooses on links that were not measured."""

DOMINATED: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "naive": lambda p: Cost(2 * (p - 1), 2 * (p - 1), p - 1),
        "tree": lambda p: Cost(2 * log(p), 2 * log(p), log(p)),
        "direct": lambda p: Cost(p - 1, p - 1, p - 1),
    },
    "all_gather": {
        "naive": lambda p: Cost(2 * (p - 1), share_of_others(p) + p - 1),
        "direct": lambda p: Cost(p - 1, share_of_others(p)),
    },
    "reduce_scatter": {
        "naive": lambda p: Cost(2 * (p - 1), p - 1 + share_of_others(p), p - 1),
        "direct": lambda p: Cost(p - 1, share_of_others(p), share_of_others(p)),
    },
}
"""Algorithms that can be measured but never cost less than the best of ALGORITHMS. Naive: one rank receives the buffers
of all others, one after the other, and sends each the result. Tree: a binomial tree, first to its root and then back.
Direct: one all-to-all, with which an all-reduce sends the whole buffer to every other rank."""


def cost(kind: str, algorithm: str, ranks: int) -> Cost:
    """The cost of a collective over `ranks` ranks with one algorithm."""
    return (DOMINATED.get(kind, {}) | ALGORITHMS[kind])[algorithm](ranks)
