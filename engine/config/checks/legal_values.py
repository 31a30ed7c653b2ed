"""The knob values that are legal with a layout's parallel grid and batch size. Used by the layout checks and by the
knobs of a live run."""

from engine.config.grid import divisors
from engine.config.layout import Layout
from engine.config.schedule_traits import (
    SCHEDULES,
    accepts_micro_batches,
    compatible_zero_stages,
    same_partition,
)


def legal_micro_batches(layout: Layout, schedule: str) -> list[int]:
    """The divisors of the local batch that `schedule` accepts as the number of micro-batches for the layout's pipeline
    stages."""
    pp, virtual = layout.grid.pp, layout.virtual_stages
    ways = divisors(layout.local_batch) if layout.local_batch else []
    return [m for m in ways if accepts_micro_batches(schedule, pp, virtual, m)]


def can_compile(layout: Layout, schedule: str) -> bool:
    """Whether `schedule` can run the compiled model. A compiled backward pass frees its saved tensors, but the second
    part of a split backward pass needs them."""
    return not (layout.train.compile and SCHEDULES[schedule].split_backward)


def can_predict(layout: Layout, schedule: str) -> bool:
    """Whether `schedule` can train the layout's multi-token prediction layers; true if there are none. A schedule with
    a split backward pass cannot train these layers: they use an embedding lookup that does not depend on the stage's
    input, and with a split backward pass, torch would run the backward pass of such an operation once for each use of
    its result."""
    return not (layout.model.mtp_layers and SCHEDULES[schedule].split_backward)


def shards_by_block(layout: Layout) -> bool:
    """Whether each block is its own FSDP unit, to overlap communication or to free weights after use."""
    return layout.grid.pp == 1 or layout.train.zero == 3


def legal_zero_stages(layout: Layout, schedule: str) -> list[int]:
    """ZeRO stages that a sharded run can use under `schedule`. Stage 3 requires that each block is its own FSDP
    unit."""
    return [
        zero
        for zero in compatible_zero_stages(schedule)
        if zero > 0 and (zero < 3 or shards_by_block(layout))
    ]


def legal_schedules(layout: Layout, zero: int) -> list[str]:
    """The schedules that are compatible with the layout's pipeline stages and local batch, and with ZeRO stage
    `zero`."""
    names = same_partition(layout.schedule.name)
    planned = not can_predict(
        layout, layout.schedule.name
    )  # a layout that is only planned keeps its schedules
    fitting = [
        name
        for name in names
        if zero in compatible_zero_stages(name)
        and can_compile(layout, name)
        and (planned or can_predict(layout, name))
    ]
    return [name for name in fitting if legal_micro_batches(layout, name)]
