"""The layout settings that the user can change hypothetically in the what-if panel: their possible values, and the
layout after a change.

Hypothetical changes keep the number of ranks and the global batch, unless they change these settings themselves.
dp_shard is adjusted to the other axes. If a change makes the number of micro-batches illegal, the nearest legal number
is used.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import structs, to_builtins

from agents.protocol import Value
from engine.config.checks.layout_checks import refusals
from engine.config.checks.legal_values import legal_micro_batches
from engine.config.grid import divisors
from engine.config.knob_values import with_knobs
from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.config.schedule_traits import SCHEDULES, compatible_zero_stages, legal_recompute
from engine.config.sections.assumptions import HardwareChoice
from engine.planner.hardware.table import names

SCALES = (0.25, 0.5, 1, 2, 4)  # sizes of the batch and of a sequence, as multiples of those of the run
CAPACITIES = (0.5, 1.0, 1.25, 1.5, 2.0, None)
VIRTUAL = (2, 3, 4, 6, 8)
MACHINE = "machine"

Changes = Mapping[str, Value]


@dataclass(frozen=True)
class Setting:
    """A layout setting that the what-if panel lists. `key`: the setting's key in a layout. `knob`: whether a running
    job may have a knob of this name, so that the value could be changed without a restart."""

    name: str
    key: str
    about: str
    get: Callable[[Layout], Value]
    put: Callable[[Layout, Any], Layout]
    values: Callable[[Layout], Iterable[Value]]
    applies: Callable[[Layout], bool] = lambda layout: True
    knob: bool = False


def _knob(
    name: str, key: str, about: str, values: Callable[[Layout], Iterable[Value]], **more: Any
) -> Setting:
    section, _, field = key.partition(".")
    return Setting(
        name,
        key,
        about,
        lambda layout: getattr(getattr(layout, section), field),
        lambda layout, value: with_knobs(layout, {name: value}),
        values,
        knob=True,
        **more,
    )


def _axis(name: str, about: str, most: Callable[[Layout], int], **more: Any) -> Setting:
    return Setting(
        name,
        f"grid.{name}",
        about,
        lambda layout: getattr(layout.grid, name),
        lambda layout, value: with_sizes(layout, layout.ranks.world, **{name: value}),
        lambda layout: divisors(most(layout)),
        **more,
    )


def _section(key: str, about: str, values: Callable[[Layout], Iterable[Value]]) -> Setting:
    section, _, field = key.partition(".")
    return Setting(
        field,
        key,
        about,
        lambda layout: getattr(getattr(layout, section), field),
        lambda layout, value: structs.replace(
            layout, **{section: structs.replace(getattr(layout, section), **{field: value})}
        ),
        values,
    )


def with_sizes(layout: Layout, ranks: int, **sizes: int) -> Layout:
    """The layout with these axis sizes; dp_shard is chosen to use the remaining ranks. Raises LayoutError."""
    grid = structs.replace(layout.grid, **sizes)
    unit = grid.pp * grid.dp_replicate * grid.cp * grid.tp
    if ranks % unit:
        raise LayoutError(f"pp x dp_replicate x cp x tp = {unit} does not divide the {ranks} ranks")
    return structs.replace(layout, grid=structs.replace(grid, dp_shard=ranks // unit))


def _scaled(value: int) -> Iterable[Value]:
    return sorted({int(value * scale) for scale in SCALES if value * scale >= 1})


def _with_machine(layout: Layout, name: str) -> Layout:
    return structs.replace(layout, hardware=HardwareChoice(name=name))


# In the order in which changes are applied: settings that follow from others come last.
SETTINGS: tuple[Setting, ...] = (
    _knob(
        "micro_batches",
        "knobs.micro_batches",
        "more: a smaller bubble and less memory for activations, but smaller matmuls and more messages",
        lambda layout: legal_micro_batches(layout, layout.schedule.name),
    ),
    _knob(
        "recompute",
        "knobs.recompute",
        "backward computes activations again: less memory, more time; selective: attention only",
        lambda layout: legal_recompute(layout.schedule.name),
    ),
    _knob(
        "capacity_factor",
        "knobs.capacity_factor",
        "maximum tokens of an expert relative to its fair share: less memory and time, but dropped tokens",
        lambda layout: CAPACITIES,
        applies=lambda layout: layout.model.moe is not None,
    ),
    _knob(
        "schedule",
        "schedule.name",
        "the order of forward and backward on the stages: a smaller bubble may need more memory",
        lambda layout: SCHEDULES,
        applies=lambda layout: layout.grid.pp > 1,
    ),
    _knob(
        "zero",
        "train.zero",
        "what data-parallel ranks shard: 1 the optimizer, 2 also gradients, 3 also weights",
        lambda layout: compatible_zero_stages(layout.schedule.name),
    ),
    Setting(
        "virtual_stages",
        "schedule.virtual_stages",
        "stages per rank: more stages, a smaller bubble, more sends",
        lambda layout: layout.virtual_stages,
        lambda layout, value: structs.replace(
            layout, schedule=structs.replace(layout.schedule, virtual_stages=value)
        ),
        lambda layout: VIRTUAL,
        lambda layout: SCHEDULES[layout.schedule.name].virtual_stages is None,
    ),
    _axis(
        "pp", "pipeline stages: less memory for weights, a larger bubble", lambda layout: layout.ranks.world
    ),
    _axis(
        "tp",
        "ranks that share each matmul: less memory, more exchanges",
        lambda layout: math.gcd(layout.ranks.world, layout.model.heads),
    ),
    _axis(
        "cp",
        "ranks that share each sequence",
        lambda layout: math.gcd(layout.ranks.world, layout.model.seq_len),
    ),
    _axis(
        "ep",
        "ranks that share the experts: less memory for weights, wider all-to-alls",
        lambda layout: layout.model.moe.experts if layout.model.moe else 1,
        applies=lambda layout: layout.model.moe is not None,
    ),
    Setting(
        "ranks",
        "grid.dp_shard",
        "more data-parallel ranks with the same global batch",
        lambda layout: layout.ranks.world,
        lambda layout, value: with_sizes(layout, value),
        lambda layout: _scaled(layout.ranks.world),
    ),
    _section("train.global_batch", "sequences of a step", lambda layout: _scaled(layout.train.global_batch)),
    _section("model.seq_len", "tokens of a sequence", lambda layout: _scaled(layout.model.seq_len)),
    _section("train.precision", "precision of the matmuls", lambda layout: ("fp32", "bf16", "fp16", "fp8")),
    Setting(
        MACHINE,
        "hardware.name",
        "the same job on another machine",
        lambda layout: layout.hardware.name,
        _with_machine,
        lambda layout: names(),
    ),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True)
class Changed:
    """A legal layout that results from changes. `follows`: other settings that had to change too, each with its old and
    new value."""

    layout: Layout
    follows: dict[str, tuple[Value, Value]]


def changed(layout: Layout, changes: Changes) -> Changed:
    """The layout after `changes`, and the other settings that had to change. Raises LayoutError, whose message is one
    sentence."""
    new = layout
    ranks = changes.get("ranks")
    if isinstance(ranks, int):  # set first, because changes of axes keep the number of ranks
        new = with_sizes(new, ranks)
    for setting in SETTINGS:
        if setting.name in changes and setting.name != "ranks":
            new = setting.put(new, changes[setting.name])
    if "virtual_stages" not in changes and new.schedule.name != layout.schedule.name:
        new = structs.replace(new, schedule=structs.replace(new.schedule, virtual_stages=None))
    if new.plan.split and (new.stages, new.virtual_stages) != (layout.stages, layout.virtual_stages):
        new = structs.replace(new, plan=structs.replace(new.plan, split=None))
    if "micro_batches" not in changes:
        new = _with_legal_micro_batches(new)
    for refusal in refusals(new):
        raise LayoutError(refusal)
    before, after = layout.grid.dp_shard, new.grid.dp_shard
    follows: dict[str, tuple[Value, Value]] = {"dp_shard": (before, after)} if before != after else {}
    count = layout.knobs.micro_batches, new.knobs.micro_batches
    if "micro_batches" not in changes and count[0] != count[1]:
        follows["micro_batches"] = count
    return Changed(new, follows)


def _with_legal_micro_batches(layout: Layout) -> Layout:
    """`layout` or, if its number of micro-batches is not legal, a copy with the nearest legal number."""
    now = layout.knobs.micro_batches
    legal = legal_micro_batches(layout, layout.schedule.name)
    if not legal or now in legal:
        return layout
    return with_knobs(layout, {"micro_batches": min(legal, key=lambda one: abs(math.log(one / now)))})


def legal_values(layout: Layout, changes: Changes, setting: Setting) -> list[Value]:
    """The legal values of a setting if the other `changes` are also made. The current value is always included."""
    found: list[Value] = []
    present = setting.get(layout)
    others = {name: value for name, value in changes.items() if name != setting.name}
    try:
        basis = changed(layout, others).layout
    except LayoutError:
        basis = layout
    for value in setting.values(basis):
        if value == present:
            continue
        try:
            changed(layout, {**others, setting.name: value})
        except LayoutError:
            continue
        found.append(value)
    found.append(present)
    order = list(setting.values(basis))
    return sorted(found, key=lambda value: _place(order, value))


def _place(order: list[Value], value: Value) -> float:
    """The position of a value in `order`; for a number that is not in `order`, a position between its neighbours."""
    if value in order:
        return float(order.index(value))
    if isinstance(value, int | float):
        return sum(isinstance(one, int | float) and one < value for one in order) - 0.5
    return -1.0


def overrides(before: Layout, after: Layout) -> list[str]:
    """The differences between two layouts, as `section.key=value` arguments of `engine run`."""
    old, new = to_builtins(before), to_builtins(after)
    return [
        f"{section}.{key}={_literal(value)}"
        for section, keys in new.items()
        for key, value in keys.items()
        if old[section][key] != value
    ]


def _literal(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_literal, value)) + "]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
