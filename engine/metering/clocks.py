"""Clocks of the meter: wall time on the CPU; CUDA events on a GPU, where the host runs ahead of the device.

A clock records points in time (marks) and passes the seconds between two marks to a callback. On the CPU the callback
is called immediately. On a GPU a mark is a CUDA event, and the callback is called after both events have completed, so
the host does not wait.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

Mark = Any  # seconds or an event, depending on the clock
Callback = Callable[[float], object]


class Clock(Protocol):
    def mark(self) -> Mark:
        """Record a mark at the current time."""

    def idle_mark(self) -> Mark:
        """Record a mark for measuring idle time. Between two such marks, `between` counts only idle time: on the CPU it
        leaves out the CPU time of this thread; on a GPU no work may be queued on the stream between the marks."""

    def end_of(self, work: dist.Work, lane: Hashable) -> Callable[[], Mark]:
        """Watch a collective that has just started. The returned function returns the mark of its end, or None if it
        has not ended. Collectives with the same `lane` end in the order in which they start. On a GPU, the caller must
        keep the collective's tensors until the stream that uses them waits for it."""

    def between(self, begin: Mark, end: Mark, callback: Callback, or_end: Mark = None) -> None:
        """Call `callback` with the seconds from `begin` to `end` or, if that is earlier, to `or_end`: immediately, or
        in `collect` once all these marks have completed."""

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

    def end_of(self, work: dist.Work, lane: Hashable) -> Callable[[], Mark]:
        ended: list[Mark] = []
        work.get_future().add_done_callback(lambda _: ended.append(self.mark()))
        return lambda: ended[0] if ended else None

    def between(self, begin: Mark, end: Mark, callback: Callback, or_end: Mark = None) -> None:
        callback((end if or_end is None else min(end, or_end)) - begin)

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
    pending: deque[tuple[Event, list[Event], Callback]] = field(default_factory=deque)


def _new_stream() -> AbstractContextManager[object]:
    """A context manager in which a new CUDA stream is the current stream."""
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


class EventClock:
    """Measures time on GPU streams: a mark is an event recorded on the current stream.

    Events are reused when all measurements of their step are complete. If the GPU is more than `STEPS` steps behind the
    host, the measurements of the oldest step are dropped, so that the number of events stays bounded.

    `make` creates an event, `aside` a context manager for work on a stream of its own.
    """

    STEPS = 4

    def __init__(
        self, make: Callable[[], Event], aside: Callable[[], AbstractContextManager[object]] = _new_stream
    ):
        self._make = make
        self._aside = defaultdict[Hashable, AbstractContextManager[object]](aside)  # by lane
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

    def end_of(self, work: dist.Work, lane: Hashable) -> Callable[[], Mark]:
        """The mark is recorded on another stream, which waits for the collective. A callback of the collective's future
        would not do: before it runs it, torch records every output of the collective on a stream of its pool, which
        delays the reuse of their memory."""
        with self._aside[lane]:
            work.wait()
            mark = self.mark()
        return lambda: mark

    def between(self, begin: Mark, end: Mark, callback: Callback, or_end: Mark = None) -> None:
        ends = [end] if or_end is None else [end, or_end]
        self._steps[-1].pending.append((begin, ends, callback))

    def start_step(self) -> None:
        self._steps.append(_Step())
        self.collect()
        if len(self._steps) > self.STEPS:
            self._free += self._steps.popleft().events

    def collect(self) -> None:
        for step in self._steps:
            while step.pending and all(event.query() for event in (step.pending[0][0], *step.pending[0][1])):
                begin, ends, callback = step.pending.popleft()
                # In milliseconds. A short collective may end before the stream that launched it reaches `begin`.
                callback(max(0.0, min(begin.elapsed_time(end) for end in ends)) / 1e3)
        while len(self._steps) > 1 and not self._steps[0].pending:
            self._free += self._steps.popleft().events


CLOCKS: dict[str, Callable[[], Clock]] = {
    "cpu": WallClock,
    "cuda": lambda: EventClock(partial(torch.cuda.Event, enable_timing=True)),
}
