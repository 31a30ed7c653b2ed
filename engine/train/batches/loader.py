"""Reads batches ahead of training, in a thread with a bounded queue.

The thread reads files and makes samples while the rank trains, so a step waits only if the thread is slower than
training. On CUDA the thread also copies the batch to pinned memory, so that the copy to the device is asynchronous.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import Empty, Full, Queue

import torch
from torch import Tensor

from engine.device import set_device

POLL_S = 0.1  # how often a waiting thread checks whether it must end


@dataclass(frozen=True)
class HostBatch:
    """The tensors of a batch in host memory. `epochs` has the same content as `engine.data.mixture.Batch.epochs`."""

    tensors: tuple[Tensor, ...]
    epochs: tuple[tuple[int, int, int], ...] = ()


Read = Callable[[int, int, int], HostBatch]
"""(step, first, count) -> the batch."""


class Loader:
    """Provides the batches that `read` returns, and reads up to `depth` steps ahead.

    If two successive calls of `get` do not request consecutive steps, or differ in `first` or `count`, reading restarts
    at the requested step. `get` raises the errors of `read`. With depth 0, `get` reads the batch itself, without a
    thread.
    """

    def __init__(self, read: Read, depth: int, device: torch.device):
        self._read_batch, self._depth, self._device = read, depth, device
        self._ahead: _Ahead | None = None

    def get(self, step: int, first: int, count: int) -> HostBatch:
        """The batch of a step. Waits until the batch has been read."""
        if not self._depth:
            return self._read(step, first, count)
        if self._ahead is None or self._ahead.next != (step, first, count):
            self.close()
            self._ahead = _Ahead(self._read, step, first, count, self._depth, self._device)
        return self._ahead.take()

    def close(self) -> None:
        """End the thread and wait until it has ended. A later `get` starts a new thread."""
        if self._ahead:
            self._ahead.end()
            self._ahead = None

    def _read(self, step: int, first: int, count: int) -> HostBatch:
        batch = self._read_batch(step, first, count)
        if self._device.type == "cuda":
            batch = replace(batch, tensors=tuple(x.pin_memory() for x in batch.tensors))
        return batch


class _Ahead:
    """A thread that reads the batches of consecutive steps."""

    def __init__(self, read: Read, step: int, first: int, count: int, depth: int, device: torch.device):
        self.next = (step, first, count)
        self._read, self._device = read, device
        self._queue: Queue[HostBatch | BaseException] = Queue(depth)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, args=self.next, name="data", daemon=True)
        self._thread.start()

    def take(self) -> HostBatch:
        while True:
            try:
                found = self._queue.get(timeout=POLL_S)
                break
            except Empty:
                assert self._thread.is_alive() or not self._queue.empty(), "the thread ended without an error"
        if isinstance(found, BaseException):
            self.next = (-1, 0, 0)  # the next request starts a new thread
            raise found
        step, first, count = self.next
        self.next = (step + 1, first, count)
        return found

    def end(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self, step: int, first: int, count: int) -> None:
        set_device(self._device)  # the current device is per thread; pinned memory belongs to it
        while not self._ending.is_set():
            found: HostBatch | BaseException
            try:
                found = self._read(step, first, count)
            except BaseException as error:  # noqa: BLE001 - raised in the training thread
                found = error
            while not self._ending.is_set():
                try:
                    self._queue.put(found, timeout=POLL_S)
                    break
                except Full:
                    continue
            if isinstance(found, BaseException):
                return
            step += 1
