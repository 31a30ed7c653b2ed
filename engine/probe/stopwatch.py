"""Times operations on all ranks at the same time."""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import TypeVar

import torch

from engine.parallel.collectives import Axis

MOST_CALLS = 2000  # maximum number of calls in a batch
Operation = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)


class Stopped(Exception):
    """Raised when the ranks were asked to stop."""


class Stopwatch:
    """Measures how long operations take, by timing batches of calls. All ranks must make the same calls in the same
    order.

    All ranks run their batches at the same time, so ranks that share cores slow each other down as in a training step.
    A batch lasts several time slices of the operating system's scheduler, and the time of a batch is that of the
    slowest rank.
    """

    def __init__(
        self,
        control: Axis,
        stop_requested: Callable[[], bool],
        device: torch.device,
        batch_s: float,
        batches: int,
        passes: int,
    ):
        self._control, self._stop_requested, self._device = control, stop_requested, device
        self._batch_s, self._batches, self._passes = batch_s, batches, passes

    def measure(
        self, makes: Mapping[Key, Callable[[], Operation]], say: Callable[[str], None]
    ) -> dict[Key, float]:
        """Seconds per call of each operation: the median over its batches of calls. See `batches`."""
        return {key: median(found) for key, found in self.batches(makes, say).items()}

    def batches(
        self, makes: Mapping[Key, Callable[[], Operation]], say: Callable[[str], None]
    ) -> dict[Key, list[float]]:
        """The seconds per call of each operation, with one value for each batch of calls. `makes` maps each key to a
        function that prepares an operation and returns it.

        Each pass runs some batches of every operation, so a disturbance of a few seconds slows a few batches of several
        operations, not all batches of one operation. Raises Stopped on all ranks if one rank was asked to stop.
        """
        times: defaultdict[Key, list[float]] = defaultdict(list)
        for turn in range(self._passes):
            for key, make in makes.items():
                say(f"pass {turn + 1} of {self._passes}: {key}")
                times[key] += self._times(make())
        return dict(times)

    def _times(self, operation: Operation) -> list[float]:
        if self.slowest([float(self._stop_requested())])[0]:
            raise Stopped
        operation()  # the first call allocates buffers and opens connections
        once = self.slowest([self._batch(operation, 2)])[0]
        calls = min(MOST_CALLS, max(1, int(self._batch_s / once)))
        times = []
        for _ in range(self._batches):
            self.slowest([0.0])  # the ranks start together
            times.append(self._batch(operation, calls))
        return self.slowest(times)

    def cpu_seconds(self, operation: Operation, calls: int = 20) -> float:
        """CPU seconds of a call on the slowest rank. Time spent waiting for a core is not included."""
        start = time.thread_time()
        for _ in range(calls):
            operation()
        return self.slowest([(time.thread_time() - start) / calls])[0]

    def slowest(self, numbers: list[float]) -> list[float]:
        """For each of `numbers`, such as times, the highest value on any rank."""
        rows = self._control.all_gather(torch.tensor(numbers, dtype=torch.float64))
        return [float(x) for x in rows.amax(0)]

    def _batch(self, operation: Callable[[], object], calls: int) -> float:
        self._synchronise()
        start = time.perf_counter()
        for _ in range(calls):
            operation()
        self._synchronise()
        return (time.perf_counter() - start) / calls

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
