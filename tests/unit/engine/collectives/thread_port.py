"""Ranks as threads of this process that exchange messages through queues."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import TypeVar

from torch import Tensor

from engine.collectives.port import Messages, Port

T = TypeVar("T")
TIMEOUT_S = 20.0


class ThreadTransport:
    """Sends a message by putting a copy of the tensor into the queue from the sender to the receiver."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], "Queue[Tensor]"]):
        self._rank, self._queues = rank, queues

    def exchange(self, sends: Messages, receives: Messages) -> None:
        for peer, x in sends:
            self._queues[self._rank, peer].put(x.clone())
        for peer, x in receives:
            message = self._queues[peer, self._rank].get(timeout=TIMEOUT_S)
            assert message.shape == x.shape and message.dtype == x.dtype
            x.copy_(message)


def on_ranks(ranks: int, work: Callable[[Port], T]) -> list[T]:
    """Run `work` on each of `ranks` ranks, then check that every message has been received."""
    queues: dict[tuple[int, int], Queue[Tensor]] = {
        (one, other): Queue() for one in range(ranks) for other in range(ranks)
    }
    with ThreadPoolExecutor(ranks) as pool:
        running = [
            pool.submit(work, Port(ThreadTransport(rank, queues), range(ranks), rank))
            for rank in range(ranks)
        ]
    results = [one.result() for one in running]
    assert all(queue.empty() for queue in queues.values())
    return results
