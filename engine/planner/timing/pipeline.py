"""Time that a pipeline takes for all micro-batches of a step, from the forward and backward time of each stage."""

from collections.abc import Sequence
from functools import lru_cache

from engine.config.schedule_traits import SCHEDULES, min_micro_batches, stages_of_rank
from engine.planner.schedule import ScheduleClock


def pipeline_time(
    name: str,
    ranks: int,
    virtual_stages: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
) -> float:
    """Seconds until the last rank has finished all micro-batches of a step, excluding the time of sends.

    Each micro-batch takes the time that the slowest rank needs for it. With GPipe, 1F1B and interleaved schedules,
    filling and draining the pipeline adds one forward and one backward pass of a stage for each rank except the
    slowest. With balanced stages, the bubble is (p - 1) / (m v + p - 1) for p ranks, m micro-batches and v stages per
    rank (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Two cases are simulated instead (see `simulated`):
    schedules that split the backward pass, and interleaved schedules with fewer micro-batches than ranks, in which a
    rank also waits between two of its stages.
    """
    busy = rank_times(name, ranks, virtual_stages, forward, backward)
    if ranks == 1:
        return micro_batches * busy[0]
    if SCHEDULES[name].split_backward or (virtual_stages > 1 and micro_batches < ranks):
        return simulated(name, ranks, virtual_stages, micro_batches, forward, backward)
    slowest = max(busy)
    return micro_batches * slowest + (sum(busy) - slowest) / virtual_stages


def rank_times(
    name: str, ranks: int, virtual_stages: int, forward: Sequence[float], backward: Sequence[float]
) -> list[float]:
    """For each rank, the computation time of one micro-batch in seconds, summed over the rank's stages."""
    return [
        sum(forward[stage] + backward[stage] for stage in stages_of_rank(name, rank, ranks, virtual_stages))
        for rank in range(ranks)
    ]


def simulated(
    name: str,
    ranks: int,
    virtual_stages: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
) -> float:
    """Time of a pipeline in seconds, from a simulation of its schedule. In a split backward pass, the input gradients
    and the weight gradients are assumed to take equal time. The time of many micro-batches is extrapolated from two
    shorter simulations: in the steady state of the pipeline, each further micro-batch adds the same time."""
    short = max(ranks * virtual_stages, min_micro_batches(name, ranks, virtual_stages))
    if micro_batches <= short + ranks:
        return _simulate(name, ranks, virtual_stages, micro_batches, forward, backward)
    one = _simulate(name, ranks, virtual_stages, short, forward, backward)
    two = _simulate(name, ranks, virtual_stages, short + ranks, forward, backward)
    return one + (micro_batches - short) * (two - one) / ranks


def _simulate(
    name: str,
    ranks: int,
    virtual_stages: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
) -> float:
    clock = _clock(name, ranks, virtual_stages, micro_batches)
    half = [seconds / 2 for seconds in backward]
    costs = {"F": forward, "B": backward, "I": half, "W": half}
    return clock.idle([[costs[act.kind][act.stage] for act in acts] for acts in clock.acts])[0]


@lru_cache(maxsize=512)
def _clock(name: str, ranks: int, virtual_stages: int, micro_batches: int) -> ScheduleClock:
    return ScheduleClock(name, ranks, virtual_stages, micro_batches)
