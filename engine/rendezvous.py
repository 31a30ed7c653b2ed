"""The context of a rank in a run: its rank number, the store that all ranks share, the stop flag and the last
operation.

Imports torch only when a rank opens its store, so that the parent of forked ranks can start the hub before it imports
torch.
"""

import functools
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agents.transport.curve_keys import Key
from agents.transport.reach import Fallback

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(minutes=5)  # maximum time that a rank waits for the store's server to start


def usable_cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LastOperation(NamedTuple):
    """The last operation that a rank recorded, and its training step."""

    step: int
    text: str


class LastOperations:
    """The operation that each rank recorded last, such as ``tp all-gather, layer 2``, in shared memory, so that the
    parent can read it after the rank has died.

    The memory is an anonymous mapping, which needs no file. The kernel frees the mapping when the last process ends.
    """

    _SLOT = struct.Struct("<q120s")  # the step + 1 (0 in an unused slot), UTF-8 text cut to 120 bytes

    def __init__(self, ranks: int):
        self._memory = mmap.mmap(-1, ranks * self._SLOT.size)  # shared between parent and forked children

    def write(self, rank: int, step: int, text: str) -> None:
        """Write the step and the text to the rank's 128-byte slot. No lock is needed, because the parent uses a slot's
        content only after the rank has died."""
        self._SLOT.pack_into(self._memory, rank * self._SLOT.size, step + 1, text.encode())

    def read(self, rank: int) -> LastOperation | None:
        """The rank's last operation, or None if the rank has recorded none."""
        step, text = self._SLOT.unpack_from(self._memory, rank * self._SLOT.size)
        return LastOperation(step - 1, text.rstrip(b"\0").decode(errors="ignore")) if step else None

    def all_slots(self) -> bytes:
        """The raw bytes of the shared memory, in which each rank has a slot for its last operation. If two calls return
        equal bytes, no rank has recorded a different operation in between."""
        return self._memory[:]


class SignalFlag:
    """A flag that a signal handler sets and the training loop reads, such as a request to stop. (`threading.Event`
    takes a lock, which is not safe in a signal handler.)"""

    def __init__(self) -> None:
        self.raised = False

    def __call__(self, *_: object) -> None:
        self.raised = True

    def take(self) -> bool:
        """Whether the flag has been set since the last call of `take`. Clears the flag."""
        raised, self.raised = self.raised, False
        return raised


@dataclass(frozen=True)
class RankContext:
    """Everything that the launcher passes to a rank."""

    rank: int
    world: int
    local_rank: int  # index of this rank among the ranks on this machine
    local_world: int  # number of ranks on this machine
    hub: str | None  # the endpoint of the hub, or of this node's relay, for ranks; None: no hub
    run_dir: Path
    open_store: "Callable[[], Store]" = field(repr=False)
    stop: SignalFlag = field(default_factory=SignalFlag, repr=False)
    save: SignalFlag = field(default_factory=SignalFlag, repr=False)
    last_operations: LastOperations = field(default_factory=lambda: LastOperations(1), repr=False)
    slot: int = field(default=0, repr=False)  # this rank's slot in `last_operations`
    key: Key | None = field(default=None, repr=False)  # authenticates this rank to the hub over TCP
    fallback: Fallback | None = field(default=None, repr=False)  # the hub, if `hub` is a relay

    def store(self) -> "Store":
        """The key-value store that all ranks share; every call returns the same object. Raises DistNetworkError if the
        store cannot be reached.

        If rank 0 serves the store, rank 0 must be the last rank to exit, because the other ranks may use the store
        until they exit.
        """
        return self.open_store()

    def stop_requested(self) -> bool:
        """Whether this rank has received a stop signal. Other ranks may not have received one."""
        return self.stop.raised

    def set_operation(self, step: int, text: str) -> None:
        """Record the current operation of this rank, such as ``set_operation(41, "tp all-gather, layer 2")``. A call
        takes about 1 us."""
        self.last_operations.write(self.slot, step, text)

    def last_operation(self) -> LastOperation | None:
        """The operation that `set_operation` recorded last."""
        return self.last_operations.read(self.slot)


Work = Callable[[RankContext], None]
"""The function that a rank runs; the rank fails if it raises."""


def single_rank_context(run_dir: Path) -> RankContext:
    """The context of a run with one rank, in this process; for tests and benchmarks."""

    def open_store() -> "Store":
        import torch.distributed as dist

        return dist.HashStore()  # type: ignore[attr-defined]

    return RankContext(0, 1, 0, 1, None, run_dir, functools.cache(open_store))


def local_store(rank: int, world: int, port: int, listening: int | None) -> "Callable[[], Store]":
    """Returns a function that opens a store on the loopback interface. Rank 0 serves the store on the listening socket
    with file descriptor `listening`.

    The parent binds this socket before it forks, so no other process can take the port. Ranks can connect before rank 0
    serves the store, because the kernel queues connections to a listening socket.
    """

    def open_store() -> "Store":
        import torch.distributed as dist

        return dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK,
            port,
            world,
            is_master=rank == 0,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listening,
        )

    return functools.cache(open_store)


def environment_store(rank: int, world: int) -> "Callable[[], Store]":
    """Returns a function that opens the store at MASTER_ADDR and MASTER_PORT. Under torchrun, torchrun's agent serves
    the store; under Slurm, rank 0 does.

    The agent's store keeps its keys when torchrun restarts the ranks, so the keys are prefixed with the restart count.
    """

    def open_store() -> "Store":
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        store, _, _ = next(rendezvous("env://", rank, world, timeout=STORE_TIMEOUT))
        return PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    return functools.cache(open_store)
