"""The visible part of a long list, with a cursor that follows the newest item until the user moves the cursor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Visible(NamedTuple):
    """The visible part of a list. `lines`: for each visible line, the index of the item shown there, and which of the
    item's lines it is."""

    lines: list[tuple[int, int]]
    cursor: int  # index of the item at the cursor
    below: int  # number of items after the last one shown


@dataclass
class Scroll:
    """The cursor and the scroll position in a list whose items are identified by keys. When items are added at the end
    or dropped at the beginning, the cursor stays on the same item, and the item stays on the same line of the panel."""

    key: object | None = None  # key of the item at the cursor; None: the cursor follows the newest item
    row: int = 0  # the line of the window on which the item at the cursor begins
    _index: int = 0  # previous index of the item, used if the item is no longer in the list

    @property
    def following(self) -> bool:
        return self.key is None

    def visible(
        self, count: int, find: Callable[[object], int | None], height_of: Callable[[int], int], height: int
    ) -> Visible:
        """The part of a list of `count` items that is visible in `height` lines. `find` returns the index of the item
        with a given key, and `height_of` returns the number of lines of the item with a given index."""
        if count < 1 or height < 1:
            return Visible([], 0, 0)
        found = count - 1 if self.key is None else find(self.key)
        at = min(self._index, count - 1) if found is None else found
        self._index = at
        own = min(height_of(at), height)
        row = height - own if self.key is None else min(max(0, self.row), height - own)
        lines = [(at, n) for n in range(own)]
        above = _lines_above(at, height_of, row)
        below = _lines_below(at, count, height_of, height - own - len(above))
        more = height - own - len(below)
        if more > len(above):  # the list ends above the bottom of the window
            above = _lines_above(at, height_of, more)
        self.row = len(above)
        lines = [*above, *lines, *below]
        return Visible(lines, at, count - 1 - lines[-1][0])

    def move(self, by: int, count: int, key_of: Callable[[int], object], lines: int = 1) -> None:
        """Move the cursor `by` items further (back if negative); a cursor that reaches the newest item follows new
        items again. `lines`: height of an item in lines."""
        if count < 1:
            return
        to = min(count - 1, max(0, self._index + by))
        self.row += (to - self._index) * lines
        self._index = to
        self.key = None if to == count - 1 else key_of(to)

    def newest(self) -> None:
        self.key = None


def _lines_above(at: int, height_of: Callable[[int], int], most: int) -> list[tuple[int, int]]:
    """The lines of the items above item `at`, from top to bottom. `most`: the maximum number of lines; if there are
    more, those nearest to the item are returned."""
    lines: list[tuple[int, int]] = []
    item = at - 1
    while item >= 0 and len(lines) < most:
        lines = [(item, n) for n in range(height_of(item))] + lines
        item -= 1
    return lines[len(lines) - most :] if len(lines) > most else lines


def _lines_below(at: int, count: int, height_of: Callable[[int], int], most: int) -> list[tuple[int, int]]:
    """The lines of the items below item `at`, from top to bottom: the nearest `most` lines."""
    lines: list[tuple[int, int]] = []
    item = at + 1
    while item < count and len(lines) < most:
        lines += [(item, n) for n in range(height_of(item))]
        item += 1
    return lines[: max(0, most)]
