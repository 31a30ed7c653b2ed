"""Counts the micro-batches in flight on each stage of a pipeline rank: those whose activations the rank keeps.

The forward pass of a micro-batch on a stage increases the stage's count by 1. The last backward action of a micro-batch
(B, or W of a split backward pass) decreases it by 1. The counts come from the rank's list of actions
(`engine/planner/schedule.py`). Except under GPipe, the sequence of actions repeats after the warm-up, so a step with
few micro-batches already reaches the highest counts of a step with many.
"""

from functools import lru_cache

from engine.config.schedule_traits import SCHEDULES
from engine.planner.schedule import action_order

Counts = tuple[int, ...]  # micro-batches in flight on each stage of a rank, in the order of its stages


def counts_in_flight(
    schedule: str, rank: int, ranks: int, virtual_stages: int, micro_batches: int
) -> tuple[Counts, ...]:
    """The combinations of in-flight counts that a rank reaches in a step, as tuples with one count per stage. A
    combination is left out if another one has at least as many micro-batches in flight on every stage. For any stage
    sizes, the peak memory occurs at one of the returned combinations."""
    if ranks == 1:
        return ((1,) * virtual_stages,)
    return _highest(
        schedule, rank, ranks, virtual_stages, _few(schedule, ranks, virtual_stages, micro_batches)
    )


def _few(schedule: str, ranks: int, virtual_stages: int, micro_batches: int) -> int:
    """A number of micro-batches, at most `micro_batches`, with which a step reaches the same maximum numbers of
    micro-batches in flight as with `micro_batches`. Tests verify this by enumeration."""
    if schedule == "gpipe":
        return micro_batches
    if not SCHEDULES[schedule].in_rounds:
        return min(micro_batches, 4 * ranks)
    rounds = max(1, micro_batches // ranks)
    return micro_batches // rounds * min(rounds, 4)


@lru_cache(maxsize=4096)
def _highest(
    schedule: str, rank: int, ranks: int, virtual_stages: int, micro_batches: int
) -> tuple[Counts, ...]:
    if schedule == "gpipe":
        return ((micro_batches,),)
    if schedule == "1f1b":
        return ((min(micro_batches, ranks - rank),),)
    acts = [
        act for turn in action_order(schedule, rank, ranks, virtual_stages, micro_batches) for act in turn
    ]
    index = {stage: n for n, stage in enumerate(sorted({act.stage for act in acts}))}
    now, seen = [0] * len(index), set[Counts]()
    for act, following in zip(acts, [*acts[1:], None], strict=True):
        if act.kind != "I":
            now[index[act.stage]] += 1 if act.kind == "F" else -1
        if act.kind == "F" and (following is None or following.kind != "F"):
            seen.add(tuple(now))
    return tuple(sorted(c for c in seen if not any(_exceeds(other, c) for other in seen)))


def _exceeds(other: Counts, counts: Counts) -> bool:
    return other != counts and all(a >= b for a, b in zip(other, counts, strict=True))
