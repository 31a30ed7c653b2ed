"""Exchanges bytes between the ranks of a wrapped program through the store of its default process group, in a separate
thread. The exchange adds no collectives and no process groups to the program.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

POLL_S = (0.002, 0.05)  # pause between two reads of the store: the first and the longest
PREFIX = "cockpit/wrap"
TIMEOUT_S = 10.0


class ClosedError(Exception):
    """The program is ending or a wait has timed out."""


class StoreRanks:
    """Gives this rank access to the store of the program's default process group. Create an instance while the process
    group exists. Threads other than the training thread call the methods. Once `closing` is set, waiting methods raise
    ClosedError."""

    def __init__(self, closing: threading.Event) -> None:
        import torch.distributed as dist

        self.rank: int = dist.get_rank()
        self.world: int = dist.get_world_size()
        self._closing = closing
        store: Any = dist.distributed_c10d._get_default_store()
        if hasattr(store, "clone"):  # its own connection, so that waits of the program do not block ours
            store = store.clone()
            store.set_timeout(timedelta(seconds=TIMEOUT_S))
        self._store: Any = dist.distributed_c10d.PrefixStore(PREFIX, store)

    def put(self, key: str, value: bytes) -> None:
        """Set a key. Raises ClosedError if the program ends."""
        if self._closing.is_set():
            raise ClosedError
        self._store.set(key, value)

    def remove(self, key: str) -> None:
        self._store.delete_key(key)

    def wait(self, keys: Sequence[str], seconds: float | None = None) -> list[bytes]:
        """Wait until all of `keys` are set, and return their values. Raises ClosedError if the program ends or if
        `seconds` have passed.
        """
        pause, longest = POLL_S
        waited = 0.0
        while not self._store.check(list(keys)):
            if self._closing.wait(pause) or (seconds is not None and waited >= seconds):
                raise ClosedError
            waited += pause
            pause = min(1.5 * pause, longest)
        return [bytes(value) for value in self._store.multi_get(list(keys))]

    def gather(self, name: str, own: bytes) -> list[bytes]:
        """Gather the bytes of all ranks, in rank order. All ranks must pass the same `name`."""
        self.put(f"{name}/{self.rank}", own)
        return self.wait([f"{name}/{rank}" for rank in range(self.world)])
