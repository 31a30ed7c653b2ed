"""Properties of pipeline schedules: the stages of each rank, and the settings that a schedule supports.

If each of the p ranks of a pipeline has v virtual stages, the pipeline has p v stages; stage 0 has the embedding, and
the last stage has the loss. In a *loop* placement rank r holds stages r, p + r, 2 p + r ... In a *v* placement (v = 2)
rank r holds stages r and 2 p - 1 - r: rank 0 has the first and the last stage, and rank p - 1 passes activations
between its two stages without a message.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ScheduleTraits:
    """Properties of one schedule."""

    placement: Literal["loop", "v"] = "loop"
    virtual_stages: int | None = 1  # exact number of stages per rank; None: two or more
    # Whether the backward pass computes input gradients first (I) and weight gradients later (W), to fill the bubble.
    split_backward: bool = False
    least: Literal["any", "stages"] = "any"  # minimum number of micro-batches; "any": 1
    in_rounds: bool = False  # runs m micro-batches in max(1, m // p) rounds of equal size


SCHEDULES: dict[str, ScheduleTraits] = {
    "gpipe": ScheduleTraits(),
    "1f1b": ScheduleTraits(least="stages"),
    "interleaved": ScheduleTraits(virtual_stages=None, in_rounds=True),
    "interleaved_zb": ScheduleTraits(virtual_stages=None, in_rounds=True, split_backward=True),
    "zbv": ScheduleTraits("v", virtual_stages=2, split_backward=True),
    "dualpipev": ScheduleTraits("v", virtual_stages=2, split_backward=True, least="stages"),
}


def accepts_micro_batches(name: str, ranks: int, virtual_stages: int, micro_batches: int) -> bool:
    """Whether the schedule `name` can run `micro_batches` micro-batches.

    1F1B and DualPipeV need at least one micro-batch per stage. Interleaved schedules run the micro-batches in rounds of
    equal size (Narayanan et al. 2021). As in torch, a round may have more micro-batches than there are pipeline ranks,
    but the number of rounds must divide the number of micro-batches.
    """
    traits = SCHEDULES[name]
    if traits.in_rounds and micro_batches % max(1, micro_batches // ranks):
        return False
    return micro_batches >= min_micro_batches(name, ranks, virtual_stages)


def min_micro_batches(name: str, ranks: int, virtual_stages: int) -> int:
    """Minimum number of micro-batches that the schedule `name` needs."""
    return ranks * virtual_stages if SCHEDULES[name].least == "stages" else 1


def legal_recompute(name: str) -> tuple[str, ...]:
    """Legal recompute modes under the schedule `name`. A schedule that splits the backward pass visits a layer once for
    the input gradient and once for the weight gradients, so with recompute the layer would be recomputed twice."""
    return ("none",) if SCHEDULES[name].split_backward else ("none", "selective", "full")


def compatible_zero_stages(name: str) -> tuple[int, ...]:
    """ZeRO stages that work under the schedule `name`. A split backward pass does not work with ZeRO 3, because its
    second part needs weights that have already been resharded."""
    return (0, 1, 2) if SCHEDULES[name].split_backward else (0, 1, 2, 3)


def stages_of_rank(name: str, rank: int, ranks: int, virtual_stages: int) -> list[int]:
    """The stages of `rank`, ascending."""
    if SCHEDULES[name].placement == "v":
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, ranks * virtual_stages, ranks))


def same_partition(name: str) -> list[str]:
    """The schedules that assign stages to ranks in the same way as the schedule `name`, including `name` itself."""
    own = SCHEDULES[name]
    same = (own.placement, own.virtual_stages)
    return [other for other, traits in SCHEDULES.items() if (traits.placement, traits.virtual_stages) == same]
