"""Converts a recording to tables with flat columns; each update adds rows to one or more tables.

The column of a nested field is named like ``comm.tp.bytes``; a list becomes rows of its own table, or JSON text. Every
row begins with its position in the recording: the id of the hub process (`hub_epoch`), the update's sequence number,
and the time by the hub's clock.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from agents.protocol import Experts, Update
from agents.recording.reader import Moment, Recording
from cockpit.data.update_kinds import UPDATE_KINDS, UpdateKind
from cockpit.export.updates import simulated, updates

Row = dict[str, Any]
PLACE = ("hub_epoch", "hub_seq", "hub_time_s")
AS_JSON = frozenset({"changes", "before", "evidence", "facts", "legal"})  # fields without a fixed structure
BLOCK = 4096  # number of rows of a table that are written together


def _one(update: Struct) -> Iterator[Row]:
    yield flat(update)


def _each(field: str) -> Callable[[Struct], Iterator[Row]]:
    """Returns a function that makes one row for each item of the list `field`, and repeats the update's other fields in
    each row."""

    def rows(update: Struct) -> Iterator[Row]:
        rest = flat(update, without=field)
        for item in getattr(update, field):
            yield {**rest, **flat(item)}

    return rows


def _loads(update: Struct) -> Iterator[Row]:
    """A table row with the load of each expert of each layer."""
    assert isinstance(update, Experts)
    for layer in update.layers:
        for expert, load in enumerate(layer.load):
            yield {"step": update.step, "layer": layer.layer, "expert": expert, "load": load}


def _maker(kind: type[Update], shown: UpdateKind) -> Callable[[Struct], Iterator[Row]]:
    if kind is Experts:
        return _loads
    return _each(shown.items) if shown.items else _one


TABLES: dict[type[Update], tuple[str, Callable[[Struct], Iterator[Row]]]] = {
    kind: (shown.table, _maker(kind, shown)) for kind, shown in UPDATE_KINDS.items() if shown.table
}


def flat(value: Struct, without: str = "", prefix: str = "") -> Row:
    """A table row: the value of each field of a message, by column name. Missing values are None."""
    row: Row = {}
    for name in value.__struct_fields__:
        if name != without:
            _flatten(row, prefix + name, getattr(value, name), name in AS_JSON)
    return row


def _flatten(row: Row, name: str, value: Any, as_json: bool) -> None:
    if value is None or isinstance(value, str | int | float):
        row[name] = value
    elif isinstance(value, list) or as_json:
        row[name] = msgspec.json.encode(value).decode()
    elif isinstance(value, Struct):
        row.update(flat(value, prefix=f"{name}."))
    else:
        for key, item in value.items():
            _flatten(row, f"{name}.{key}", item, False)


def rows(recording: Recording) -> Iterator[tuple[str, Row]]:
    """Every row of every table, in the order in which the updates arrived. If the run was simulated, each row has
    `simulated` set to True."""
    mark = {"simulated": True} if simulated(recording) else {}
    for moment, update in updates(recording):
        if type(update) in TABLES:
            table, made_of = TABLES[type(update)]
            for row in made_of(update):
                yield table, {**_place(moment), **row, **mark}


def _place(moment: Moment) -> Row:
    return dict(zip(PLACE, (moment.epoch, moment.seq, moment.time_s), strict=True))


def columns(recording: Recording) -> dict[str, dict[str, type]]:
    """For every table that has rows, its columns and the type of their values. Mixed int and float values become
    float; other mixed types become str.
    """
    found: dict[str, dict[str, type]] = {}
    for table, row in rows(recording):
        known = found.setdefault(table, {})
        for name, value in row.items():
            kind = type(None) if value is None else type(value)
            known[name] = _common(known.get(name, kind), kind)
    return found


def _common(one: type, other: type) -> type:
    if one is other or other is type(None):
        return one
    if one is type(None):
        return other
    return float if {one, other} == {int, float} else str


def cell(value: Any, kind: type) -> Any:
    """`value` converted to the type of its column."""
    if value is None or type(value) is kind:
        return value
    if kind is float:
        return float(value)
    return msgspec.json.encode(value).decode() if kind is str else None


def blocks(recording: Recording, known: dict[str, dict[str, type]]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each table in blocks of `BLOCK` rows. `known`: the columns of each table, with their types;
    each row has all columns of its table."""
    waiting: dict[str, list[Row]] = {}
    for table, row in rows(recording):
        if table not in known:
            continue  # the run is live, and this row was recorded after its columns were read
        block = waiting.setdefault(table, [])
        block.append({name: cell(row.get(name), kind) for name, kind in known[table].items()})
        if len(block) == BLOCK:
            yield table, waiting.pop(table)
    yield from waiting.items()
