"""A rank's place in a run: who it is, how it meets the others, whether it shall stop, and where it is now.

Torch-free until `RankContext.store` is called, so that the parent of forked ranks need not know torch.
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

from agents.transport.keys import Key

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(minutes=5)  # how long a rank waits for the store's host to appear


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LastOperation(NamedTuple):
    """What a rank last said of itself: the step (counted as the trainer counts) and what it was doing."""

    step: int
    text: str


class LastOperations:
    """One slot per rank in memory that parent and ranks share: a dead rank can still be asked where it was.

    The memory is anonymous: it needs no name in a file system and is gone with its last process.
    """

    _SLOT = struct.Struct("<q120s")  # the step + 1 (an untouched slot reads 0), UTF-8 text cut to 120 bytes

    def __init__(self, ranks: int):
        self._memory = mmap.mmap(-1, ranks * self._SLOT.size)  # shared between parent and forked children

    def write(self, rank: int, step: int, text: str) -> None:
        """One copy of 128 bytes without a lock: a reader that matters comes after the writer has died."""
        self._SLOT.pack_into(self._memory, rank * self._SLOT.size, step + 1, text.encode())

    def read(self, rank: int) -> LastOperation | None:
        """None when the rank never said."""
        step, text = self._SLOT.unpack_from(self._memory, rank * self._SLOT.size)
        return LastOperation(step - 1, text.rstrip(b"\0").decode(errors="ignore")) if step else None

    def everything(self) -> bytes:
        """All slots as they are; equal twice means that no rank said anything in between."""
        return self._memory[:]


class StopFlag:
    """Raised by a signal handler, read by the trainer. (An `Event` has a lock: not for handlers.)"""

    def __init__(self) -> None:
        self.raised = False

    def __call__(self, *_: object) -> None:
        self.raised = True


@dataclass(frozen=True)
class RankContext:
    """Handed to a rank's work; everything the launcher knows that the trainer needs."""

    rank: int
    world: int
    local_rank: int  # among the ranks of this machine
    local_world: int  # ranks on this machine
    hub: str | None  # the endpoint at which a hub expects ranks; None means that there is no hub
    run_dir: Path
    meet: "Callable[[], Store]" = field(repr=False)
    stop: StopFlag = field(default_factory=StopFlag, repr=False)
    whereabouts: LastOperations = field(default_factory=lambda: LastOperations(1), repr=False)
    slot: int = field(default=0, repr=False)
    key: Key | None = field(default=None, repr=False)  # the one to come to the hub under, over TCP

    def store(self) -> "Store":
        """The store in which the ranks meet, always the same one. Raises DistNetworkError if there is none.

        Where rank 0 serves it, rank 0 stays until the others have ended: they may use it to their end.
        """
        return self.meet()

    def stop_requested(self) -> bool:
        """Whether SIGTERM reached this rank: a flag only, and perhaps on this rank alone."""
        return self.stop.raised

    def at(self, step: int, text: str) -> None:
        """Say where this rank is, e.g. ``at(41, "tp all-gather, layer 2")``; takes about a microsecond."""
        self.whereabouts.write(self.slot, step, text)

    def where(self) -> LastOperation | None:
        """What `at` said last."""
        return self.whereabouts.read(self.slot)


Work = Callable[[RankContext], None]
"""What a rank does; it fails by raising."""


def alone(run_dir: Path) -> RankContext:
    """The only rank of a world of one, in this very process: for tests and for measuring."""

    def meet() -> "Store":
        import torch.distributed as dist

        return dist.HashStore()  # type: ignore[attr-defined]

    return RankContext(0, 1, 0, 1, None, run_dir, functools.cache(meet))


def local_meeting(rank: int, world: int, port: int, listening: int | None) -> "Callable[[], Store]":
    """A store on the loopback; rank 0 serves it on the `listening` descriptor that its parent has bound.

    Bound before the fork, the port cannot be taken by another, and a rank that is early waits in the backlog.
    """

    def meet() -> "Store":
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

    return functools.cache(meet)


def joined_meeting(rank: int, world: int) -> "Callable[[], Store]":
    """The store at MASTER_ADDR and MASTER_PORT: torchrun's agent serves it; under Slurm rank 0 does.

    The agent's outlives ranks that it starts again, so each start has names of its own in it.
    """

    def meet() -> "Store":
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        store, _, _ = next(rendezvous("env://", rank, world, timeout=STORE_TIMEOUT))
        return PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    return functools.cache(meet)
