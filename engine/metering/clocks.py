"""The clocks of a meter: the wall's where the host itself computes and waits, a GPU's own where it runs ahead of it.

A clock gives marks, and tells of two of them how long it was between: at once, or when the device has come so far.
Nobody ever waits for it.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

Mark = Any  # a clock's own: seconds, or an event
Callback = Callable[[float], object]


class Clock(Protocol):
    def mark(self) -> Mark:
        """This moment."""

    def rest(self) -> Mark:
        """This moment on the clock that runs while nothing is done but waiting."""

    def between(self, begin: Mark, end: Mark, tell: Callback) -> None:
        """`tell` the seconds from `begin` to `end`, now or later."""

    def start_step(self) -> None:
        """Marks of steps before are not used in new measurements."""

    def collect(self) -> None:
        """Callback what can be told by now."""


class WallClock:
    """Seconds, told at once."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def rest(self) -> Mark:
        """It runs while this thread sleeps: between actions a rank sleeps in sends and receives only."""
        return time.perf_counter() - time.thread_time()

    def between(self, begin: Mark, end: Mark, tell: Callback) -> None:
        tell(end - begin)

    def start_step(self) -> None:
        pass

    def collect(self) -> None:
        pass


class Event(Protocol):
    """Of `torch.cuda.Event`, what a clock needs."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...


@dataclass
class _Step:
    events: list[Event] = field(default_factory=list)
    untold: deque[tuple[Event, Event, Callback]] = field(default_factory=deque)


class EventClock:
    """Moments on the GPU's streams: an event is recorded on the current stream, and read when it has come to pass.

    Events are used again once all of their step has been told. Where the GPU falls more than `STEPS` steps behind, the
    oldest step goes untold, so that there is an end to events.
    """

    STEPS = 4

    def __init__(self, make: Callable[[], Event]):
        self._make = make
        self._free: list[Event] = []
        self._steps = deque([_Step()])

    def mark(self) -> Mark:
        event = self._free.pop() if self._free else self._make()
        event.record()
        self._steps[-1].events.append(event)
        return event

    def rest(self) -> Mark:
        """A stream between two marks with no work between them waits, for others or for the host."""
        return self.mark()

    def between(self, begin: Mark, end: Mark, tell: Callback) -> None:
        self._steps[-1].untold.append((begin, end, tell))

    def start_step(self) -> None:
        self._steps.append(_Step())
        self.collect()
        if len(self._steps) > self.STEPS:
            self._free += self._steps.popleft().events

    def collect(self) -> None:
        for step in self._steps:
            while step.untold and all(event.query() for event in step.untold[0][:2]):
                begin, end, tell = step.untold.popleft()
                tell(begin.elapsed_time(end) / 1e3)  # it gives milliseconds
        while len(self._steps) > 1 and not self._steps[0].untold:
            self._free += self._steps.popleft().events


CLOCKS: dict[str, Callable[[], Clock]] = {
    "cpu": WallClock,
    "cuda": lambda: EventClock(partial(torch.cuda.Event, enable_timing=True)),
}
