"""Ranks as threads of this process that exchange messages through queues."""

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import TypeVar

from torch import Tensor

from engine.collectives.port import Messages, Port
from engine.metering.meter import Meter
from engine.parallel.collectives import Axis

T = TypeVar("T")
TIMEOUT_S = 20.0


class Network:
    """The messages between the ranks. `sent`: for each sender, the receiver and the bytes of each of its messages."""

    def __init__(self) -> None:
        self.sent: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._queues: dict[tuple[int, int, int], Queue[Tensor]] = {}
        self._lock = threading.Lock()

    def queue(self, sender: int, receiver: int, tag: int) -> "Queue[Tensor]":
        with self._lock:
            return self._queues.setdefault((sender, receiver, tag), Queue())

    def received(self, rank: int) -> list[int]:
        """The bytes of each message to `rank`."""
        return [size for messages in self.sent.values() for to, size in messages if to == rank]

    @property
    def idle(self) -> bool:
        """Whether every message has been received."""
        return all(queue.empty() for queue in self._queues.values())


class ThreadTransport:
    """Sends a message by putting a copy of the tensor into the queue from the sender to the receiver."""

    def __init__(self, rank: int, network: Network, tag: int = 0):
        self._rank, self._network, self._tag = rank, network, tag

    def exchange(self, sends: Messages, receives: Messages) -> None:
        for peer, x in sends:
            self._network.sent[self._rank].append((peer, x.nbytes))
            self._network.queue(self._rank, peer, self._tag).put(x.clone())
        for peer, x in receives:
            message = self._network.queue(peer, self._rank, self._tag).get(timeout=TIMEOUT_S)
            assert message.shape == x.shape and message.dtype == x.dtype
            x.copy_(message)


class MessageAxis(Axis):
    """An axis over gloo, without a process group, whose point-to-point messages go to other threads. It has no other
    collectives of torch, so a test fails if it uses one."""

    def __init__(self, rank: int, size: int, network: Network):
        super().__init__("control", None, Meter())
        self.rank, self.size, self._gloo, self._network = rank, size, True, network

    def port(self, tag: int = 0) -> Port:
        return Port(ThreadTransport(self.rank, self._network, tag), range(self.size), self.rank)


def on_ranks(ranks: int, work: Callable[[Port], T]) -> list[T]:
    """Run `work` on each of `ranks` ranks, then check that every message has been received."""
    results, network = on_network(
        ranks, lambda rank, network: work(Port(ThreadTransport(rank, network), range(ranks), rank))
    )
    assert network.idle
    return results


def on_network(ranks: int, work: Callable[[int, Network], T]) -> tuple[list[T], Network]:
    """Run `work` on each of `ranks` ranks. Returns the results and the network with the messages that were sent."""
    network = Network()
    with ThreadPoolExecutor(ranks) as pool:
        running = [pool.submit(work, rank, network) for rank in range(ranks)]
    return [one.result() for one in running], network
