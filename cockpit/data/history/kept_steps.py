"""A bounded set of steps: the newest, the slowest, and some others, spread evenly."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import nlargest
from typing import Generic, TypeVar

T = TypeVar("T")


class KeptSteps(Generic[T]):
    """Keeps one item per step, such as a record, for a limited number of steps. `most`: maximum number of items.
    `budget`: maximum total size of the items (see `add`). If a limit is exceeded, the item with the smallest gap
    between its previous and next kept steps is dropped. Two groups of items are protected, and dropped only if they
    alone exceed the limits: the newest items and the slowest items. `newest` and `slowest` are the sizes of these
    groups.

    `time_of(step)` returns the duration of a step in ms, or 0 if it is unknown; the slowest items are those with the
    longest duration.
    """

    def __init__(
        self,
        time_of: Callable[[int], float],
        most: int,
        newest: int,
        slowest: int,
        budget: float = float("inf"),
    ) -> None:
        self.most, self.newest, self.slowest, self.budget = most, newest, slowest, budget
        self.dropped = 0  # number of items dropped since the last `clear`
        self._time_of = time_of
        self._steps: list[int] = []
        self._items: dict[int, T] = {}
        self._sizes: dict[int, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __contains__(self, step: object) -> bool:
        return step in self._items

    def get(self, step: int | None) -> T | None:
        return None if step is None else self._items.get(step)

    @property
    def steps(self) -> list[int]:
        """The steps whose items are kept, ascending. Callers must not change the list."""
        return self._steps

    def copy(self, time_of: Callable[[int], float]) -> "KeptSteps[T]":
        """A copy that shares the items but gets the step durations from `time_of`."""
        still: KeptSteps[T] = KeptSteps(time_of, self.most, self.newest, self.slowest, self.budget)
        still.dropped, still._size = self.dropped, self._size
        still._steps, still._items, still._sizes = self._steps[:], self._items.copy(), self._sizes.copy()
        return still

    def add(self, step: int, item: T, size: int = 0) -> None:
        """Keep `item`, replacing the item of the same step if there is one."""
        if step not in self._items:
            insort(self._steps, step)
        self._size += size - self._sizes.get(step, 0)
        self._items[step], self._sizes[step] = item, size
        while len(self._steps) > 1 and (len(self._steps) > self.most or self._size > self.budget):
            self._drop(self._least())
            self.dropped += 1

    def cut(self, step: int) -> None:
        """Remove `step` and all later steps, because the run was resumed and repeats them."""
        for later in self._steps[bisect_left(self._steps, step) :]:
            self._drop(later)

    def clear(self) -> None:
        self.cut(0)
        self.dropped = 0

    def _drop(self, step: int) -> None:
        self._steps.remove(step)
        self._size -= self._sizes.pop(step)
        del self._items[step]

    def _least(self) -> int:
        steps = self._steps
        slow = set(nlargest(self.slowest, steps, key=self._time_of))
        others = [place for place in range(len(steps) - self.newest) if steps[place] not in slow]
        if not others:  # the newest and the slowest alone exceed the budget
            return next((step for step in steps if step not in slow), steps[0])

        def gap(place: int) -> int:
            # The first step has no earlier neighbour; it is kept until no other step is left.
            return steps[place + 1] - steps[place - 1] if 0 < place < len(steps) - 1 else 1 << 62

        return steps[min(others, key=gap)]
