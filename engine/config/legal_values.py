"""Values that a layout's partition of the model and its batch allow: for checks, and for knobs while it trains."""

from engine.config.grid import divisors
from engine.config.layout import Layout
from engine.config.schedule_traits import (
    SCHEDULES,
    accepts_micro_batches,
    compatible_zero_stages,
    same_partition,
)


def legal_micro_batches(layout: Layout, schedule: str) -> list[int]:
    """Divisors of the local batch that `schedule` accepts over the layout's partition."""
    pp, virtual = layout.grid.pp, layout.virtual_stages
    ways = divisors(layout.local_batch) if layout.local_batch else []
    return [m for m in ways if accepts_micro_batches(schedule, pp, virtual, m)]


def can_compile(layout: Layout, schedule: str) -> bool:
    """Whether `schedule` can run what the layout compiles: a compiled backward frees as it goes what it was given, so
    one that comes in two parts, input first, would not find it again for the weights."""
    return not (layout.train.compile and SCHEDULES[schedule].split_backward)


def shards_by_block(layout: Layout) -> bool:
    """Whether blocks are gathered and reduced one by one: to hide it behind computation, or to let go of them."""
    return layout.grid.pp == 1 or layout.train.zero == 3


def legal_zero_stages(layout: Layout, schedule: str) -> list[int]:
    """The ZeRO stages that a sharded run may turn to under `schedule`; 3 needs blocks that can be let go of."""
    return [
        zero
        for zero in compatible_zero_stages(schedule)
        if zero > 0 and (zero < 3 or shards_by_block(layout))
    ]


def legal_schedules(layout: Layout, zero: int) -> list[str]:
    """The schedules that run over the layout's partition, ZeRO stage and batch."""
    names = same_partition(layout.schedule.name)
    fitting = [name for name in names if zero in compatible_zero_stages(name) and can_compile(layout, name)]
    return [name for name in fitting if legal_micro_batches(layout, name)]
