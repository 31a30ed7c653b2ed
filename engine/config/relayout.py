"""The part of a layout that a running job can change: the grid, the schedule, the ZeRO stage, the number of
micro-batches and recompute. Torch-free.

A change is written as ``section.key=value`` assignments separated by spaces, such as "grid.tp=2 grid.dp_shard=2". This
string contains every key in KEYS whose value is not the default. The string therefore fully describes this part of the
layout, and applying an earlier string restores the earlier layout.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec

from agents.protocol import spell
from engine.config.checks.trainable import untrained
from engine.config.grid import ORDER
from engine.config.layout import Layout
from engine.config.refusal import LayoutError, shown
from engine.config.sections.knobs import Knobs
from engine.config.sections.parallelism import GridSizes, Schedule
from engine.config.sections.training import Train
from engine.config.toml import check_layout, from_toml, to_toml

KNOB = "layout"  # the knob whose value is the text
FORM = "section.key=value words, such as grid.tp=2 grid.dp_shard=2"
MOST_CHARACTERS = 256  # limit on the text, as on every knob value
KEYS: dict[str, dict[str, Any]] = {
    section: {field.name: field.default for field in msgspec.structs.fields(kind) if field.name in names}
    for section, kind, names in (
        ("grid", GridSizes, GridSizes.__struct_fields__),
        ("schedule", Schedule, Schedule.__struct_fields__),
        ("train", Train, ("zero",)),
        ("knobs", Knobs, ("micro_batches", "recompute")),
    )
}
"""The keys that a relayout may change, by section, with their defaults."""


def layout_text(layout: Layout) -> str:
    """The string for `layout`: the keys in KEYS whose value is not the default, with their values."""
    return " ".join(
        f"{section}.{key}={spell(value)}"
        for section, keys in KEYS.items()
        for key, default in keys.items()
        if (value := getattr(getattr(layout, section), key)) != default
    )


def relaid(layout: Layout, text: str) -> Layout:
    """A copy of `layout` in which each key in KEYS is set to its value in `text`, or to its default if `text` does not
    contain the key. Raises LayoutError if an assignment, or the resulting layout, is not legal."""
    legal = ", ".join(f"{section}.{key}" for section, keys in KEYS.items() for key in keys)
    named: set[str] = set()
    for word in text.split():
        name = word.partition("=")[0]
        section, _, key = name.partition(".")
        if key not in KEYS.get(section, ()):
            raise LayoutError(f"{shown(name)} cannot change while a run is live; legal: {legal}")
        if name in named:
            raise LayoutError(f"{name} is given twice; name each key once")
        named.add(name)
    plain = msgspec.structs.replace(
        layout,
        **{
            section: msgspec.structs.replace(getattr(layout, section), **keys)
            for section, keys in KEYS.items()
        },
    )
    found = from_toml(to_toml(plain), text.split())
    if refusal := untrained(found):
        raise LayoutError(refusal)
    if len(layout_text(found)) > MOST_CHARACTERS:
        raise LayoutError(f"the layout differs from the defaults in too many keys: its text has over {MOST_CHARACTERS} "
                          "characters; restart the run with --resume instead")  # fmt: skip
    return found


def changed_text(old: Layout, new: Layout) -> str:
    """The changes of a relayout, such as ``grid.pp 2 -> 1, grid.dp_shard 2 -> 4``."""
    return ", ".join(
        f"{section}.{key} {spell(was)} -> {spell(then)}"
        for section, keys in KEYS.items()
        for key in keys
        if (was := getattr(getattr(old, section), key)) != (then := getattr(getattr(new, section), key))
    )


def smaller(layout: Layout, most: int, least: int) -> Iterator[Layout]:
    """Yield legal layouts with at least `least` and at most `most` ranks that are like `layout` except for the sizes of
    the parallel axes. No axis is larger than in `layout`. Layouts with more ranks come first. Among layouts with the
    same number of ranks, those that reduce dp_replicate or dp_shard come before those that reduce cp, ep, tp or pp.
    """
    sizes = {axis: getattr(layout.grid, axis) for axis in (*ORDER, "ep")}
    costs = {"dp_replicate": 1, "dp_shard": 2, "cp": 4, "ep": 8, "tp": 16, "pp": 32}
    tried: list[tuple[int, int, int, dict[str, int]]] = []
    for values in product(*(range(1, size + 1) for size in sizes.values())):
        chosen = dict(zip(sizes, values, strict=True))
        world = 1
        for axis in ORDER:
            world *= chosen[axis]
        if least <= world <= most:
            cost = sum(costs[axis] for axis, size in chosen.items() if size != sizes[axis])
            tried.append((-world, cost, -chosen["ep"], chosen))
    for *_, chosen in sorted(tried, key=lambda one: one[:3]):
        try:
            yield check_layout(
                msgspec.structs.replace(layout, grid=msgspec.structs.replace(layout.grid, **chosen))
            )
        except LayoutError:
            continue
