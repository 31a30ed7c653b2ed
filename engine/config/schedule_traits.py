"""How a schedule cuts the model: the stages a rank holds, and what each schedule asks of the run.

A pipeline of p ranks with v virtual stages each has p v stages; stage 0 embeds, the last one ends in the loss. Laid out
as a *loop*, rank r holds stages r, p + r, 2 p + r ...; as a *v* (v = 2), it holds r and 2 p - 1 - r, so that the first
and the last stage share rank 0 and the turn at the end costs no message.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ScheduleTraits:
    """What a schedule asks: where stages lie, how many a rank holds, and whether its backward comes in two parts."""

    placement: Literal["loop", "v"] = "loop"
    virtual_stages: int | None = 1  # a rank holds exactly so many; None: two or more
    split_backward: bool = False  # input gradients first (I), weight gradients later (W), to fill the bubble
    least: Literal["any", "stages"] = "any"  # fewest micro-batches: any number, or as many as stages
    in_rounds: bool = False  # micro-batches go in max(1, m // p) rounds of equal size


SCHEDULES: dict[str, ScheduleTraits] = {
    "gpipe": ScheduleTraits(),
    "1f1b": ScheduleTraits(least="stages"),
    "interleaved": ScheduleTraits(virtual_stages=None, in_rounds=True),
    "interleaved_zb": ScheduleTraits(virtual_stages=None, in_rounds=True, split_backward=True),
    "zbv": ScheduleTraits("v", virtual_stages=2, split_backward=True),
    "dualpipev": ScheduleTraits("v", virtual_stages=2, split_backward=True, least="stages"),
}


def accepts_micro_batches(name: str, ranks: int, virtual_stages: int, micro_batches: int) -> bool:
    """Whether the schedule `name` can run that many micro-batches.

    1F1B fills every stage once before it drains; interleaved ones go in rounds (Narayanan et al. 2021, relaxed as in
    torch: any number of micro-batches that the rounds divide).
    """
    kind = SCHEDULES[name]
    if kind.in_rounds and micro_batches % max(1, micro_batches // ranks):
        return False
    return micro_batches >= min_micro_batches(name, ranks, virtual_stages)


def min_micro_batches(name: str, ranks: int, virtual_stages: int) -> int:
    """The fewest micro-batches that the schedule `name` can run."""
    return ranks * virtual_stages if SCHEDULES[name].least == "stages" else 1


def legal_recompute(name: str) -> tuple[str, ...]:
    """What backward may compute again. One in two parts visits a layer once for its input and once for each of its
    weights, and would compute it again each time."""
    return ("none",) if SCHEDULES[name].split_backward else ("none", "selective", "full")


def compatible_zero_stages(name: str) -> tuple[int, ...]:
    """The ZeRO stages that go with a schedule. A backward in two parts comes back for weights that ZeRO 3 has
    resharded in between."""
    return (0, 1, 2) if SCHEDULES[name].split_backward else (0, 1, 2, 3)


def stages_of_rank(name: str, rank: int, ranks: int, virtual_stages: int) -> list[int]:
    """The stages that `rank` of `ranks` holds, ascending."""
    if SCHEDULES[name].placement == "v":
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, ranks * virtual_stages, ranks))


def same_partition(name: str) -> list[str]:
    """The schedules that run over the same partition as `name`, itself among them."""
    kind = SCHEDULES[name]
    same = (kind.placement, kind.virtual_stages)
    return [other for other, its in SCHEDULES.items() if (its.placement, its.virtual_stages) == same]
