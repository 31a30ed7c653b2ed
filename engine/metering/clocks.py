"""Clocks of the meter: wall time on the CPU; CUDA events on a GPU, where the host runs ahead of the device.

A clock records points in time (marks) and passes the seconds between two marks to a callback. On the CPU the callback
is called immediately. On a GPU a mark is a CUDA event, and the callback is called after both events have completed, so
the host does not wait.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

Mark = Any  # seconds or an event, depending on the clock
Callback = Callable[[float], object]


class Clock(Protocol):
    def mark(self) -> Mark:
        """Record a mark at the current time."""

    def idle_mark(self) -> Mark:
        """Record a mark for measuring idle time. Between two such marks, `between` counts only idle time: on the CPU it
        leaves out the CPU time of this thread; on a GPU no work may be queued on the stream between the marks."""

    def between(self, begin: Mark, end: Mark, callback: Callback) -> None:
        """Call `callback` with the seconds from `begin` to `end`: immediately, or in `collect` once both marks have
        completed."""

    def start_step(self) -> None:
        """Start a step. The caller must not pass marks of earlier steps to `between` afterwards."""

    def collect(self) -> None:
        """Call the callbacks of all measurements that are complete."""


class WallClock:
    """Wall time; callbacks run immediately."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def idle_mark(self) -> Mark:
        """Idle time is wall time minus CPU time of this thread. Between two pipeline actions, a rank sleeps only in
        sends and receives, so idle time measures the wait for other ranks."""
        return time.perf_counter() - time.thread_time()

    def between(self, begin: Mark, end: Mark, callback: Callback) -> None:
        callback(end - begin)

    def start_step(self) -> None:
        pass

    def collect(self) -> None:
        pass


class Event(Protocol):
    """The methods of `torch.cuda.Event` that `EventClock` calls."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...


@dataclass
class _Step:
    events: list[Event] = field(default_factory=list)
    pending: deque[tuple[Event, Event, Callback]] = field(default_factory=deque)


class EventClock:
    """Measures time on GPU streams: a mark is an event recorded on the current stream.

    Events are reused when all measurements of their step are complete. If the GPU is more than `STEPS` steps behind the
    host, the measurements of the oldest step are dropped, so that the number of events stays bounded.
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

    def idle_mark(self) -> Mark:
        """Record a mark. If no work is queued on the stream between two marks, the time between them is idle time: the
        stream waits for other ranks or for the host."""
        return self.mark()

    def between(self, begin: Mark, end: Mark, callback: Callback) -> None:
        self._steps[-1].pending.append((begin, end, callback))

    def start_step(self) -> None:
        self._steps.append(_Step())
        self.collect()
        if len(self._steps) > self.STEPS:
            self._free += self._steps.popleft().events

    def collect(self) -> None:
        for step in self._steps:
            while step.pending and all(event.query() for event in step.pending[0][:2]):
                begin, end, callback = step.pending.popleft()
                callback(begin.elapsed_time(end) / 1e3)  # elapsed_time is in milliseconds
        while len(self._steps) > 1 and not self._steps[0].pending:
            self._free += self._steps.popleft().events


CLOCKS: dict[str, Callable[[], Clock]] = {
    "cpu": WallClock,
    "cuda": lambda: EventClock(partial(torch.cuda.Event, enable_timing=True)),
}
