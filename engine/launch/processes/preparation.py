"""Preparation of ranks that torchrun or Slurm has started: from the start of each process until all are ready to join
the process group.

Before a rank joins, it may read data and check a checkpoint for any length of time. So each rank repeatedly reports
through the store that it is alive, and the other ranks wait for it as long as it does.
"""

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from agents.rundir.hub_supervisor import say
from agents.rundir.runs import RunError
from engine.checkpoint.reading import changed_files
from engine.launch.processes.imports import without_collections
from engine.rendezvous import RankContext

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

ALIVE_S = 5.0  # time between two signs of life of a rank
SILENT_S = 300.0  # a rank without a sign of life for this time is lost
TOLD_S = 60.0  # after this time, rank 0 says for which rank it waits
LONGEST_PAUSE_S = 0.5  # between two looks at the store
ENDED = "ended"


class Preparation:
    """Context manager for the preparation of the rank that `context` describes. Opens the store, so all ranks must
    enter it soon after their start. In its body, the store may only be used through this object: a call that waits in
    the store would hold up the signs of life."""

    def __init__(self, context: RankContext):
        self._rank, self._world = context.rank, context.world
        with without_collections():  # this imports torch
            self._store: Store = context.store()
        self._checks = 0  # number of checkpoints whose check has begun
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="signs-of-life", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if error:
            self._store.set(f"alive/{self._rank}", ENDED)

    def meet(self) -> None:
        """Wait until all ranks have called this. Meanwhile, every other rank than rank 0 checks its share of the
        checkpoints that rank 0 considers. Raises RunError if a rank is lost."""
        self._store.set(f"ready/{self._rank}", "")
        if self._rank:
            self._check()
        else:
            self._store.set(f"check/{self._checks}", "")  # no further checks
            for rank in range(self._world):
                self._wait(f"ready/{rank}", rank)
            self._store.set("ready", "")
        self._wait("ready", 0)

    def changed_files(self, folder: Path, sums: dict[str, int]) -> list[str]:
        """The files of a checkpoint whose checksum is not that in `sums`. Only rank 0 calls this; every rank checks its
        share of the files."""
        self._store.set(f"check/{self._checks}", msgspec.json.encode((str(folder), sums)).decode())
        found = changed_files(folder, self._share(sums))
        others: list[str] = []
        for rank in range(1, self._world):
            others += msgspec.json.decode(self._wait(f"checked/{self._checks}/{rank}", rank), type=list[str])
        self._checks += 1
        # Another machine may not see the files yet, or may see other files under this path.
        return found + changed_files(folder, {name: sums[name] for name in others if name in sums})

    def _check(self) -> None:
        """Check this rank's share of each checkpoint that rank 0 considers, until rank 0 has chosen one."""
        while task := self._wait(f"check/{self._checks}", 0):
            folder, sums = msgspec.json.decode(task, type=tuple[str, dict[str, int]])
            found = changed_files(Path(folder), self._share(sums))
            key = f"checked/{self._checks}/{self._rank}"
            self._store.set(key, msgspec.json.encode(found).decode())
            self._checks += 1

    def _share(self, sums: dict[str, int]) -> dict[str, int]:
        return dict(list(sums.items())[self._rank :: self._world])

    def _show(self) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            try:
                self._store.set(f"alive/{self._rank}", str(turn))
            except RuntimeError:  # the process that serves the store has ended
                return
            self._over.wait(ALIVE_S)

    def _wait(self, key: str, rank: int) -> bytes:
        """The value of a key that `rank` sets. Waits as long as that rank shows signs of life."""
        began = changed = looked = time.monotonic()
        sign, told, pause = "", False, 0.01
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - looked >= ALIVE_S:
                looked, newest = now, self._sign(rank)
                changed, sign = (now if newest != sign else changed), newest
            if sign == ENDED or now - changed > SILENT_S:
                why = "has ended" if sign == ENDED else f"has shown no sign of life for {SILENT_S:g} s"
                raise RunError(f"rank {self._rank} cannot start: rank {rank} {why}")
            if self._rank == 0 and not told and now - began > TOLD_S:
                told = True
                say(
                    f"rank 0 has waited {TOLD_S:g} s for rank {rank}, which still reads data or checkpoints\n"
                )
        return bytes(self._store.get(key))

    def _sign(self, rank: int) -> str:
        key = f"alive/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""
