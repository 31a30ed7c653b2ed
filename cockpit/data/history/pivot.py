"""Converts dictionaries, one per rank, to columns, one per key."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeVar

T = TypeVar("T")


def pivot(rows: Sequence[Mapping[str, T]]) -> dict[str, Sequence[T | None]]:
    """For each key, its value in each row, or None if the row lacks the key. Keys are in order of first appearance.

    If all rows have the same keys in the same order, as is usual for the ranks of a run, the rows are transposed in one
    pass, which is several times as fast as looking up each value.
    """
    if not rows:
        return {}
    shapes = set(map(tuple, rows))
    if len(shapes) == 1:
        return dict(zip(shapes.pop(), zip(*(row.values() for row in rows), strict=True), strict=True))
    keys = dict.fromkeys(chain.from_iterable(rows))
    return {key: [row.get(key) for row in rows] for key in keys}
