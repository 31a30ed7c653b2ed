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
from typing import Literal

import torch.distributed as dist
from msgspec import structs
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from agents.protocol import Ack, Changes, clip
from engine.checkpoint.folders import PARTIAL, Checkpoint, Manifest, name_of, prune, remove, seal, sweep
from engine.checkpoint.state import State
from engine.checkpoint.storage import Planner, Reader, Writer
from engine.config.layout import CheckpointSettings as Settings
from engine.config.refusal import RefusedError

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
            return f"the checkpoint of step {self.step} was not saved: {self.why}; training goes on"
        return f"checkpoint of step {self.step}: {self.folder}, {self.bytes / 2**20:.1f} MiB in {self.seconds:.1f} s"


def restore(checkpoint: Checkpoint, state: State) -> None:
    """Take over the state saved in `checkpoint`, whatever the layout it was saved in; the same call on every rank.

    RefusedError on all ranks if it cannot be read or holds another model.
    """
    group = dist.new_group(backend="gloo")
    reader = Reader(checkpoint.folder, checkpoint.manifest.files)
    try:
        load(state.tensors(), storage_reader=reader, planner=Planner(), process_group=group)
    except CheckpointException as error:
        raise RefusedError(f"{checkpoint.folder} cannot be resumed from: {_first_line(error)}") from None
    state.spread()


class Checkpoints:
    """The checkpoints of one run, in the folder `checkpoints_dir`; the same calls on every rank.

    Make it before the first step, then tell it of each step's end. `at` is told, again and again, that it waits for a
    save to end: a run that is stopping and says nothing new is taken for stuck.
    """

    def __init__(
        self,
        checkpoints_dir: Path,
        settings: Settings,
        state: State,
        describe: Callable[[int], Manifest],
        at: Callable[[str], None] = lambda _: None,
    ):
        self.checkpoints_dir, self._settings, self._state, self._describe = (
            checkpoints_dir,
            settings,
            state,
            describe,
        )
        self._at = at
        self._requested = False
        self._begun: int | None = None  # steps done at the newest save
        self._rank, self._leads = dist.get_rank(), dist.get_rank() == 0
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._finished: deque[Saved] = deque()
        self._newest: Saved | None = None  # of the finished ones
        if self._leads:
            sweep(checkpoints_dir)

    def request(self, _: object = None) -> None:
        """Have the state saved when this step ends, on all ranks alike."""
        self._requested = True

    @property
    def requested(self) -> bool:
        return self._requested

    def due(self, done: int, last: bool) -> bool:
        """Whether to save now that `done` steps are done, of which this is the last. Twice after the same step, at
        which a paused run stays, only if the first has failed; every rank knows by then, for it has waited."""
        if done == self._begun:
            if not self._requested:
                return False
            self._requested = False
            self.wait()
            return bool(self._newest and self._newest.why)
        every = self._settings.every
        return self._requested or (every > 0 and (last or done % every == 0))

    def save(self, done: int) -> None:
        """Begin to save the state as it is after `done` steps. Waits for an earlier save, and for nothing else."""
        self._requested, self._begun = False, done
        self.wait()
        tensors, manifest = self._state.copy(), self._describe(done)
        self._thread = threading.Thread(
            target=self._save, args=(tensors, manifest), name="checkpoint", daemon=True
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
            self._at(f"waiting for the checkpoint, {time.monotonic() - began:.1f} s")
        self._thread = None

    def fate(self, step: int) -> Saved | None:
        """What became of the newest save, if it is of this step and no longer on its way; the same on every rank."""
        if self._thread and self._thread.is_alive():
            return None
        return self._newest if self._newest and self._newest.step == step else None

    def take_finished(self) -> list[Saved]:
        """What became of saves since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _save(self, tensors: dict[str, Tensor], manifest: Manifest) -> None:
        """In the thread: write, then, on the leader, seal. Every rank hears whether it is saved."""
        start = time.monotonic()
        folder = self.checkpoints_dir / name_of(manifest.step)
        partial = folder.with_name(folder.name + PARTIAL)
        sums: dict[str, int] = {}
        why, size = "", 0
        try:
            sums = self.write(tensors, partial)
        except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is not an Exception
            why = _first_line(error)
        try:
            told: list[tuple[dict[str, int], str]] = [({}, "")] * dist.get_world_size()
            dist.all_gather_object(told, (sums, why), group=self._group)
            why = next((of_rank for _, of_rank in told if of_rank), "")
            if self._leads and not why:
                try:
                    known = {name: value for of_rank, _ in told for name, value in of_rank.items()}
                    size = sum(seal(partial, manifest, known).manifest.files.values())
                    prune(self.checkpoints_dir, self._settings.keep)
                except OSError as error:
                    why = _first_line(error)
            fate = [why]
            dist.broadcast_object_list(fate, src=0, group=self._group)
            why = fate[0]
        except Exception as error:  # noqa: BLE001 - another rank is gone
            why = why or _first_line(error)
        if why and self._leads:
            remove(partial)
        self._newest = Saved(manifest.step, folder, time.monotonic() - start, size, why)
        self._finished.append(self._newest)

    def write(self, tensors: dict[str, Tensor], partial: Path) -> dict[str, int]:
        """Each rank its part; done, and on disk, on all ranks when it returns. Checksums of what this rank wrote."""
        writer = Writer(partial, self._rank)
        save(tensors, storage_writer=writer, process_group=self._group)
        return writer.sums


class SaveAcks:
    """Acks of changes that ask for a save, held until it is on disk or has failed: applied means saved."""

    def __init__(self, checkpoints: Checkpoints, settle: Callable[[Ack], None]):
        self._checkpoints, self._settle = checkpoints, settle
        self._held: list[tuple[Ack, bool]] = []
        self._leads = dist.get_rank() == 0

    def hold(self, ack: Ack, changes: Changes) -> None:
        """Settle later what has just been applied at a step boundary; `save` is among its changes."""
        self._held.append((ack, len(changes) == 1))
        if self._leads:
            text = f"the checkpoint of step {ack.step} is being written"
            self._settle(structs.replace(ack, state="agreed", why=text))

    def tell(self) -> None:
        """Settle what is decided. A change that asked for more than the save is in force whatever became of that."""
        for held in list(self._held):
            ack, alone = held
            saved = self._checkpoints.fate(ack.step)
            if saved is None:
                continue
            self._held.remove(held)
            if saved.why:
                state: Literal["applied", "rejected"] = "rejected" if alone else "applied"
                ack = structs.replace(ack, state=state, why=clip(str(saved)))
            self._settle(ack)


def _first_line(error: BaseException) -> str:
    """Of torch's report on all ranks, the first one's cause."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {cause}"
    return str(error).partition("\n")[0] or type(error).__name__
