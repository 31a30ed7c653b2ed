"""Saving and loading a run with torch.distributed.checkpoint, beside training.

A save copies the state to host memory between two steps; a thread of its own, with a process group of its own, writes
it while the next steps run. Only a save that comes while the one before is still being written waits for it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from engine.layout import Snapshot as Settings
from engine.sentence import RefusedError
from engine.snapshots import (
    PARTIAL,
    Manifest,
    Snapshot,
    name_of,
    prune,
    remove,
    seal,
    sweep,
)
from engine.train.state import State
from engine.train.storage import Planner, Reader, Writer

WORD_EVERY_S = 5.0  # how often a rank that waits for a save says so


@dataclass(frozen=True)
class Saved:
    """What became of a save."""

    step: int
    folder: Path
    seconds: float
    bytes: int = 0
    why: str = ""  # it failed, and this is the cause

    def __str__(self) -> str:
        if self.why:
            return f"the snapshot of step {self.step} was not saved: {self.why}; training goes on"
        return f"snapshot of step {self.step}: {self.folder}, {self.bytes / 2**20:.1f} MiB in {self.seconds:.1f} s"


def restore(snapshot: Snapshot, state: State) -> None:
    """Take over the state saved in `snapshot`, whatever the layout it was saved in; the same call on every rank.

    RefusedError on all ranks if it cannot be read or holds another model.
    """
    group = dist.new_group(backend="gloo")
    reader = Reader(snapshot.folder, snapshot.manifest.files)
    try:
        load(state.tensors(), storage_reader=reader, planner=Planner(), process_group=group)
    except CheckpointException as error:
        raise RefusedError(f"{snapshot.folder} cannot be resumed from: {_first_line(error)}") from None
    state.spread()


class Snapshots:
    """The snapshots of one run, in the folder `shelf`; the same calls on every rank.

    Make it before the first step, then tell it of each step's end. `at` is told, again and again, that it waits for a
    save to end: a run that is stopping and says nothing new is taken for stuck.
    """

    def __init__(
        self,
        shelf: Path,
        settings: Settings,
        state: State,
        describe: Callable[[int], Manifest],
        at: Callable[[str], None] = lambda _: None,
    ):
        self.shelf, self._settings, self._state, self._describe = shelf, settings, state, describe
        self._at = at
        self._wished = False
        self._begun: int | None = None  # steps done at the newest save
        self._rank, self._leads = dist.get_rank(), dist.get_rank() == 0
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._finished: deque[Saved] = deque()
        if self._leads:
            sweep(shelf)

    def wish(self, _: object = None) -> None:
        """Have the state saved when this step ends, on all ranks alike."""
        self._wished = True

    @property
    def wished(self) -> bool:
        return self._wished

    def due(self, done: int, last: bool) -> bool:
        """Whether to save now that `done` steps are done, of which this is the run's last. Never twice after the same
        step: a run that is paused stays at it."""
        if done == self._begun:
            self._wished = False
            return False
        every = self._settings.every
        return self._wished or (every > 0 and (last or done % every == 0))

    def save(self, done: int) -> None:
        """Begin to save the state as it is after `done` steps. Waits for an earlier save, and for nothing else."""
        self._wished, self._begun = False, done
        self.wait()
        tensors, manifest = self._state.copy(), self._describe(done)
        self._thread = threading.Thread(
            target=self._save, args=(tensors, manifest), name="snapshot", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being saved."""
        if not self._thread:
            return
        began = time.monotonic()
        while True:
            self._thread.join(WORD_EVERY_S)
            if not self._thread.is_alive():
                break
            self._at(f"waiting for the snapshot, {time.monotonic() - began:.1f} s")
        self._thread = None

    def take_finished(self) -> list[Saved]:
        """What became of saves since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _save(self, tensors: dict[str, Tensor], manifest: Manifest) -> None:
        """In the thread: write, then, on the leader, seal."""
        start = time.monotonic()
        folder = self.shelf / name_of(manifest.step)
        partial = folder.with_name(folder.name + PARTIAL)
        why, size = "", 0
        try:
            sums = self._checksums(self.write(tensors, partial))
            if self._leads:
                size = sum(seal(partial, manifest, sums).manifest.files.values())
                prune(self.shelf, self._settings.keep)
        except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is not an Exception
            why = _first_line(error)
            if self._leads:
                remove(partial)
        self._finished.append(Saved(manifest.step, folder, time.monotonic() - start, size, why))

    def write(self, tensors: dict[str, Tensor], partial: Path) -> dict[str, int]:
        """Each rank its part; done, and on disk, on all ranks when it returns. Checksums of what this rank wrote."""
        writer = Writer(partial, self._rank)
        save(tensors, storage_writer=writer, process_group=self._group)
        return writer.sums

    def _checksums(self, mine: dict[str, int]) -> dict[str, int]:
        """Of what all ranks have written, on the leader."""
        sums: list[dict[str, int]] | None = [{}] * dist.get_world_size() if self._leads else None
        dist.gather_object(mine, sums, group=self._group)
        return {name: value for told in sums or () for name, value in told.items()}


def _first_line(error: BaseException) -> str:
    """Of torch's report on all ranks, the first one's cause."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {cause}"
    return str(error).partition("\n")[0] or type(error).__name__
