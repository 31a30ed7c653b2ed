"""Which of two layouts is faster, and whether the predictions are certain enough to tell.

The uncertainty of a predicted ratio of two step times is estimated from pairs of published layouts for the same
workload (model, GPUs, batch, sequence length), as a factor: for most of these pairs (the fraction is `Limits.held`),
the measured ratio differs from the predicted ratio by at most this factor. This uncertainty factor is smaller if both
layouts split their layers in the same way, because both then run the same kernels and the same communication in each
layer (`python -m tests.bench plan`, docs/measurements.md).

A second rule for ordering two layouts uses no uncertainty factor; it compares the components of the step time
(computation, recomputation, bubble, ...). This rule applies to two layouts that split their layers in the same way. If
one of them is predicted to be slower in total and not faster in any component, it is certain to be the slower one: a
prediction error that scales a component by the same factor in both layouts cannot change their order.
"""

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from engine.planner.workload.job import Job

Factor = Annotated[float, Meta(ge=1)]
Phases = Mapping[str, float]
LEAST_RATIO = 1.02  # layouts whose predicted step times differ by less are as fast as each other
NEGLIGIBLE = 0.002  # time saved in a component that does not count, relative to the step time


class Limits(Struct, frozen=True):
    """Uncertainty factors for the predicted ratio of the step times of two layouts. `same_split` applies if both
    layouts split their layers in the same way, and `other_split` if they do not. `held`: how often each of the two
    factors holds, measured on the pairs of published layouts to which it applies. It is the fraction of these pairs for
    which the measured ratio of the step times differs from the predicted ratio by at most the factor."""

    held: Annotated[float, Meta(gt=0, lt=1)]
    same_split: Factor
    other_split: Factor


@lru_cache(maxsize=1)
def limits() -> Limits:
    text = resources.files(__package__).joinpath("order.toml").read_text()
    return msgspec.convert(tomllib.loads(text), Limits)


def same_split(first: Job, second: Job) -> bool:
    """Whether two layouts split each layer in the same way: with equal tp, cp and ep, and with ZeRO 3 (weights gathered
    for each use) in both or in neither."""
    return _split(first) == _split(second)


def _split(job: Job) -> tuple[object, ...]:
    return job.grid.tp, job.grid.cp, job.grid.ep, job.etp, job.zero == 3


def reach(first: Job, second: Job) -> float:
    """The uncertainty factor for the ratio of these two layouts' step times (see `Limits`)."""
    return limits().same_split if same_split(first, second) else limits().other_split


def certain(first: Job, first_s: Phases, second: Job, second_s: Phases) -> bool:
    """Whether it is certain which of two layouts is faster, given the predicted seconds of each component of their
    steps: the step times differ by more than the uncertainty factor (`reach`), or `slower_in_all` is true."""
    return _ratio(first_s, second_s) > reach(first, second) or slower_in_all(first, first_s, second, second_s)


def slower_in_all(first: Job, first_s: Phases, second: Job, second_s: Phases) -> bool:
    """Whether one of two layouts with the same split is slower in total and not faster in any component of the step
    time."""
    if _ratio(first_s, second_s) < LEAST_RATIO or not same_split(first, second):
        return False
    saved = [first_s.get(cause, 0.0) - second_s.get(cause, 0.0) for cause in {*first_s, *second_s}]
    least = NEGLIGIBLE * min(sum(first_s.values()), sum(second_s.values()))
    return max(saved) <= least or min(saved) >= -least


def _ratio(first_s: Phases, second_s: Phases) -> float:
    first, second = sum(first_s.values()), sum(second_s.values())
    return max(first, second) / min(first, second)
