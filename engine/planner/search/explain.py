"""Explains the result of a search: how each change of a single setting would affect step time and memory, and why."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from engine.config.checks.layout_checks import refusals
from engine.config.layout import Layout
from engine.config.schedule_traits import SCHEDULES, compatible_zero_stages, legal_recompute
from engine.planner.hardware.description import Hardware
from engine.planner.search.search import MARGIN, Found
from engine.planner.search.space import MICRO_BATCHES, Choice, recompute_modes
from engine.planner.what_if import WhatIf, what_if

Order = Literal["faster", "slower", "uncertain"]
GIB = 2**30
CLOSE = 0.005  # maximum relative difference in step time that is reported as "as fast"


@dataclass(frozen=True)
class Neighbour:
    """The best choice with one setting changed. `why`: what the change does to step time or memory, or why it is not
    legal, in one clause. `order`: "faster" or "slower" if the predictions tell which layout is faster, else
    "uncertain"; None if the changed choice is not legal or does not fit into memory."""

    change: str
    choice: Choice
    why: str
    plan: WhatIf | None = None
    order: Order | None = None

    @property
    def seconds(self) -> float | None:
        return self.plan.time.step_s[1] if self.plan and self.plan.time else None


def neighbours(layout: Layout, hardware: Hardware, best: Found) -> list[Neighbour]:
    """The choices that differ from the best choice in a single setting, each with the effect of this change."""
    zeros = {best.choice.zero, layout.train.zero or 2, 3} & {*compatible_zero_stages(best.choice.schedule)}
    return [
        _judge(layout, hardware, best, change, choice)
        for change, choice in _changes(best.choice, recompute_modes(layout), sorted(zeros))
        if layout.model.moe or choice.ep == 1
    ]


def _judge(layout: Layout, hardware: Hardware, best: Found, change: str, choice: Choice) -> Neighbour:
    changed = choice.of(layout)
    if refusal := next(refusals(changed), None):
        return Neighbour(change, choice, f"not legal: {refusal.partition('; legal')[0]}")
    plan = what_if(changed, hardware)
    assert plan.time and plan.capacity and best.plan.time
    if plan.memory.peak > MARGIN * plan.capacity:
        return Neighbour(change, choice, _size(plan, plan.capacity), plan)
    ratio = plan.time.step_s[1] / best.seconds - 1
    before, after = best.plan.time.phases, plan.time.phases
    grown = {cause: after.get(cause, 0.0) - seconds for cause, seconds in before.items()}
    pick = max if ratio > 0 else min
    cause = pick(grown, key=grown.__getitem__)
    if abs(ratio) < CLOSE:
        more = plan.memory.peak - best.plan.memory.peak
        return Neighbour(
            change, choice, f"as fast, {abs(more) / GIB:.1f} GiB {_more(more)}", plan, "uncertain"
        )
    word: Order = "slower" if ratio > 0 else "faster"
    effect = f"{100 * abs(ratio):.1f} % {word}"
    because = f"{cause} {grown[cause]:+.3g} s"
    if best.surely_differs_from(plan):
        return Neighbour(change, choice, f"{effect}: {because}", plan, word)
    return Neighbour(change, choice, f"order uncertain ({effect}): {because}", plan, "uncertain")


def _size(plan: WhatIf, capacity: float) -> str:
    rank = plan.memory.ranks[plan.memory.worst_rank]
    what = "does not fit" if rank.total > capacity else "leaves no margin"
    part = rank.components()[rank.largest] / GIB
    return f"{what}: {rank.total / GIB:.0f} GiB of {capacity / GIB:.0f}, {rank.largest} {part:.0f}"


def _more(size: float) -> str:
    return "more" if size > 0 else "less"


def _changes(best: Choice, modes: Iterable[str], zeros: Iterable[int]) -> Iterator[tuple[str, Choice]]:
    """Variants of the best choice with one change each: the size of an axis halved or doubled (dp_shard is adjusted to
    keep the number of ranks), or another schedule, micro-batch size, recompute mode or ZeRO stage."""
    for axis in ("tp", "pp", "cp", "ep", "dp_replicate"):
        size = getattr(best, axis)
        for new in (size // 2, size * 2):
            if new and (choice := _resized(best, axis, new)):
                yield f"{axis} {size} -> {new}", choice
    for name, virtual in _other_schedules(best):
        stages = "" if SCHEDULES[name].virtual_stages else f" x{virtual}"
        yield f"{name}{stages}", best._replace(schedule=name, virtual_stages=virtual)
    for size in (best.micro_batch // 2, best.micro_batch * 2):
        if size in MICRO_BATCHES:
            yield f"micro-batch {best.micro_batch} -> {size}", best._replace(micro_batch=size)
    for mode in modes:
        if mode != best.recompute and mode in legal_recompute(best.schedule):
            yield f"recompute -> {mode}", best._replace(recompute=mode)
    for zero in zeros:
        if zero != best.zero:
            yield f"zero {best.zero} -> {zero}", best._replace(zero=zero)


def _resized(best: Choice, axis: str, new: int) -> Choice | None:
    """The choice with the new size of an axis and the same number of ranks, or None if there is no such choice."""
    if axis == "ep":
        return best._replace(ep=new)
    ranks = best.dp_shard * getattr(best, axis)
    if ranks % new:
        return None
    return best._replace(**{axis: new, "dp_shard": ranks // new})


def _other_schedules(best: Choice) -> Iterator[tuple[str, int]]:
    if best.pp == 1:
        return
    every = (
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("interleaved_zb", 2),
        ("zbv", 2),
        ("dualpipev", 2),
    )
    for name, virtual in every:
        if (name, virtual) != (best.schedule, best.virtual_stages):
            yield name, virtual
