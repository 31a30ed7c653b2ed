"""History in bounded memory: each record has a list of numbers for each layer, such as the load of each expert. Old
records are merged: of several consecutive records, only the lowest and the highest values are kept.

The newest records are kept unchanged. Older neighbouring records are merged, one pair per new record, so that the time
to add a record stays constant.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

Values: TypeAlias = "array[float]"

MOST_FRAMES = 512
FEWEST_FRAMES = 4


@dataclass(frozen=True)
class Frame:
    """The values of one record, or the lowest and the highest values of `records` consecutive records, from step
    `first` to step `last`. NaN: no value."""

    first: int
    last: int
    records: int
    low: Values
    high: Values  # the same object as `low` if there is one record
    whole: bool  # whether no value is NaN


@dataclass(frozen=True)
class Range:
    """The lowest and the highest value of the steps `first` to `last`."""

    first: int
    last: int
    low: float
    high: float


class Frames:
    """A history of frames with at most `most_values` numbers in total. Each `Frame` and its arrays are immutable, so
    copies of the history share them."""

    def __init__(self, most_values: int) -> None:
        self._most_values = most_values
        self._frames: list[Frame] = []
        self._places: dict[int, range] = {}  # layer -> the positions of its values in the arrays of a frame
        self._size = 0

    def copy(self) -> "Frames":
        same = Frames(self._most_values)
        same._frames, same._places, same._size = self._frames.copy(), self._places.copy(), self._size
        return same

    # ------------------------------------------------------------------------------------------------- writing

    def add(self, step: int, rows: Mapping[int, Sequence[float]]) -> None:
        """Add the record of `step`. `rows`: the values of each layer. If the step is not after the newest one, the run
        has resumed from an earlier checkpoint, and the later records are removed."""
        if self._frames and step <= self._frames[-1].last:
            self.cut(step)
        self._make_places(rows)
        values = array("f", [math.nan]) * self._size
        for layer, row in rows.items():
            place = self._places[layer]
            values[place.start : place.stop] = array("f", row)
        self._frames.append(Frame(step, step, 1, values, values, sum(map(len, rows.values())) == self._size))
        while len(self._frames) > self.limit:
            self._merge_one_pair()

    def cut(self, step: int) -> None:
        """Remove the values of `step` and of later steps."""
        while self._frames and self._frames[-1].last >= step:
            self._frames.pop()

    def clear(self) -> None:
        self._frames, self._places, self._size = [], {}, 0

    @property
    def limit(self) -> int:
        """The maximum number of frames. At most half of the frames are merged ones, which need two arrays each: one for
        the lowest and one for the highest values."""
        fit = 2 * self._most_values // (3 * max(1, self._size))
        return max(FEWEST_FRAMES, min(MOST_FRAMES, fit))

    def _make_places(self, rows: Mapping[int, Sequence[float]]) -> None:
        """Make room for the layers of a record. If the number of values of a layer has changed, the model has changed,
        and the history is cleared.
        """
        if any(layer in self._places and len(self._places[layer]) != len(row) for layer, row in rows.items()):
            self.clear()
        new = {layer: len(row) for layer, row in rows.items() if layer not in self._places}
        if self._size and self._size + sum(new.values()) > self._most_values:
            self.clear()
            new = {layer: len(row) for layer, row in rows.items()}
        if not new:
            return
        for layer, size in new.items():
            self._places[layer] = range(self._size, self._size + size)
            self._size += size
        more = array("f", [math.nan]) * sum(new.values())
        self._frames = [
            replace(one, low=one.low + more, high=one.high + more, whole=False) for one in self._frames
        ]

    def _merge_one_pair(self) -> None:
        """Merge the pair of neighbouring frames with the fewest records in total; if there are several such pairs, the
        oldest. Frames in the newest half are never merged.
        """
        old = range(max(1, len(self._frames) - self.limit // 2 - 1))
        at = min(old, key=lambda i: self._frames[i].records + self._frames[i + 1].records)
        one, two = self._frames[at : at + 2]
        lowest, highest = (min, max) if one.whole and two.whole else (_lowest, _highest)
        low = array("f", map(lowest, one.low, two.low))
        high = array("f", map(highest, one.high, two.high))
        merged = Frame(one.first, two.last, one.records + two.records, low, high, one.whole and two.whole)
        self._frames[at : at + 2] = [merged]

    # ------------------------------------------------------------------------------------------------- reading

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, at: int) -> Frame:
        return self._frames[at]

    @property
    def layers(self) -> list[int]:
        """The layers that have values, ascending."""
        return sorted(self._places)

    def place(self, layer: int, number: int) -> int | None:
        """The index, in the arrays of a frame, of the value that has the index `number` in its layer; None if the layer
        has no such value."""
        place = self._places.get(layer)
        return place[number] if place is not None and 0 <= number < len(place) else None

    def row(self, frame: Frame, layer: int) -> tuple[Sequence[float], Sequence[float]]:
        """A layer's list of numbers in this frame, such as the load of each expert. A frame may cover several records,
        so there are two sequences: the lowest value of each number over these records, and the highest. Both are empty
        if the layer has no values in this frame."""
        place = self._places.get(layer, range(0))
        low = frame.low[place.start : place.stop]
        if not low or math.isnan(low[0]):
            return (), ()
        return low, low if frame.high is frame.low else frame.high[place.start : place.stop]

    def find(self, step: int) -> int | None:
        """The index of the frame with `step`, or else of the last frame before `step`; None if there is no
        such frame.
        """
        at = bisect_right(self._frames, step, key=_first) - 1
        return at if at >= 0 else None

    def series(self, layer: int, number: int) -> Iterator[Range]:
        """The values at index `number` in a layer's lists, such as the load of the expert `number`: one for each frame
        that has this value, oldest first."""
        place = self.place(layer, number)
        if place is not None:
            for frame in self._frames:
                if not math.isnan(frame.low[place]):
                    yield Range(frame.first, frame.last, frame.low[place], frame.high[place])


def _first(frame: Frame) -> int:
    return frame.first


def _lowest(one: float, two: float) -> float:
    return min(_known(one, two), default=math.nan)


def _highest(one: float, two: float) -> float:
    return max(_known(one, two), default=math.nan)


def _known(*values: float) -> Iterable[float]:
    return [value for value in values if not math.isnan(value)]
