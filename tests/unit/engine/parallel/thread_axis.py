"""An axis whose ranks are threads of this process, for tests without a process group."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from engine.metering.meter import Meter
from engine.parallel.collectives import AsyncCollective, Axis

T = TypeVar("T")


class ThreadAxis(Axis):
    """Blocking collectives between threads: all ranks write to a shared list."""

    def __init__(self, rank: int, size: int, box: list[Tensor], barrier: threading.Barrier):
        super().__init__("cp", None, Meter())
        self.rank, self.size = rank, size
        self._box, self._barrier = box, barrier

    def _all(self, x: Tensor) -> list[Tensor]:
        self._box[self.rank] = x.detach().clone()
        self._barrier.wait()
        everybodys = list(self._box)
        self._barrier.wait()
        return everybodys

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x))

    def exchange(self, x: Tensor) -> Tensor:
        return torch.stack([rows[self.rank] for rows in self._all(x)])

    def start_all_gather(self, out: Tensor, x: Tensor, async_op: bool = False) -> AsyncCollective:
        out.copy_(torch.cat(self._all(x)))
        return AsyncCollective(self, "all-gather", (self.size - 1) * x.nbytes, ())

    def start_all_reduce(self, x: Tensor) -> AsyncCollective:
        x.copy_(torch.stack(self._all(x)).sum(0))
        return AsyncCollective(self, "all-reduce", 2 * x.nbytes * (self.size - 1) // self.size, ())

    def start_row_exchange(self, x: Tensor) -> tuple[AsyncCollective, Tensor]:
        sent = x.nbytes // self.size * (self.size - 1)
        return AsyncCollective(self, "exchange", sent, ()), self.exchange(x)

    def start_ring(self, x: Tensor) -> tuple[AsyncCollective, Tensor]:
        return AsyncCollective(self, "ring", x.nbytes, ()), self._all(x)[self.rank - 1].clone()


def on_each(size: int, work: Callable[[ThreadAxis], T]) -> list[T]:
    """Run `work` on each of `size` ranks and return the results. If a rank fails, the barrier breaks for all ranks."""
    box: list[Tensor] = [torch.empty(0)] * size
    barrier = threading.Barrier(size, timeout=20)

    def run(rank: int) -> T:
        try:
            return work(ThreadAxis(rank, size, box, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(size)]
    failed = [error for error in (rank.exception() for rank in ranks) if error]
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [rank.result() for rank in ranks]
