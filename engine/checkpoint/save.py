"""Saves a run with torch.distributed.checkpoint. Saving is asynchronous: it runs in the background while training
continues.

A save copies the state to host memory between two steps. A thread with its own process group writes the copy while the
next steps run. If the previous save has not finished when the next save starts, training waits for it, or the new save
is skipped (`checkpoint.while_saving`).
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
from torch.distributed.checkpoint.state_dict_saver import save

from agents.protocol import Ack, Changes, clip
from engine.checkpoint.host_copy import HostCopy
from engine.checkpoint.manifest import PARTIAL, Manifest, folder_name
from engine.checkpoint.state_tensors import State
from engine.checkpoint.storage import FILES_TIMEOUT, Writer, first_line
from engine.checkpoint.writing import prune, remove, remove_partial, seal
from engine.config.sections.run import CheckpointSettings as Settings

REPORT_EVERY_S = 5.0  # time between two progress reports of a rank that waits for a save


@dataclass(frozen=True)
class Saved:
    """The result of a save."""

    step: int
    folder: Path
    seconds: float
    bytes: int = 0
    why: str = ""  # the cause, if the save failed
    skipped: bool = False  # the save was not started

    def __str__(self) -> str:
        if self.skipped:
            return f"the checkpoint of step {self.step} is skipped: {self.why}"
        if self.why:
            return f"the checkpoint of step {self.step} was not saved: {self.why}; training continues"
        return f"checkpoint of step {self.step}: {self.folder}, {self.bytes / 2**20:.1f} MiB in {self.seconds:.1f} s"


class Checkpoints:
    """Saves the checkpoints of one run in the folder `checkpoints_dir`. All ranks must call its methods in the same
    order.

    Must be constructed before the first step, because the constructor creates a process group. `describe(done)` returns
    the manifest of a checkpoint that is saved after `done` steps. `report` is called every few seconds while a rank
    waits for a save, because the parent process kills a stopping run that reports no progress. `anywhere` is a
    collective that only the training thread may call; it returns whether its argument is true on any rank.
    """

    def __init__(
        self,
        checkpoints_dir: Path,
        settings: Settings,
        state: State,
        describe: Callable[[int], Manifest],
        copy: HostCopy,
        anywhere: Callable[[bool], bool],
        report: Callable[[str], None] = lambda _: None,
    ):
        self.checkpoints_dir, self._settings, self._state = checkpoints_dir, settings, state
        self._describe, self._report = describe, report
        self._copy, self._anywhere = copy, anywhere
        self._requested = False
        self._saved_at: int | None = None  # number of completed steps when the newest save started
        self._rank, self._leads = dist.get_rank(), dist.get_rank() == 0
        self._group = dist.new_group(backend="gloo", timeout=FILES_TIMEOUT)
        self._copied: tuple[dict[str, Tensor], Manifest] | None = None
        self._thread: threading.Thread | None = None
        self._finished: deque[Saved] = deque()
        self._newest: Saved | None = None  # the newest finished save
        if self._leads:
            remove_partial(checkpoints_dir)

    def request(self, _: object = None) -> None:
        """Request a save at the end of this step. All ranks must call this in the same step."""
        self._requested = True

    @property
    def requested(self) -> bool:
        return self._requested

    def due(self, done: int, last: bool) -> bool:
        """Whether to save a checkpoint after `done` steps; `last`: whether the run ends after these steps. The result
        is equal on all ranks.

        A save after `done` steps may already have been started, for example during a pause. A requested save is then
        due only if the earlier one failed. Therefore all ranks first wait for the result of the earlier save.
        """
        if done == self._saved_at:
            if not self._requested:
                return False
            self._requested = False
            self.wait()
            return bool(self._newest and self._newest.why)
        every = self._settings.every
        if self._requested or (every > 0 and last):
            return True
        return every > 0 and done % every == 0 and not self._skips(done)

    def _skips(self, done: int) -> bool:
        """Whether to skip the periodic save after `done` steps, because the previous one is still running on a rank."""
        if self._settings.while_saving == "wait":
            return False
        running = self._anywhere(self._thread is not None and self._thread.is_alive())
        if running:
            folder, why = self.checkpoints_dir / folder_name(done), "the previous one is still being written"
            self._finished.append(Saved(done, folder, 0.0, why=why, skipped=True))
        return running

    def save(self, done: int) -> None:
        """Copy the current state, and start writing it as the checkpoint of step `done`."""
        self.copy(done)
        self.start()

    def copy(self, done: int) -> None:
        """Copy the current state, to save it as the checkpoint of step `done`. If an earlier save is still running,
        wait for it first."""
        self._requested, self._saved_at = False, done
        self.wait()
        self._copied = self._copy(self._state.tensors()), self._describe(done)

    @property
    def copied(self) -> bool:
        """Whether `copy` has been called, and `start` has not."""
        return self._copied is not None

    def start(self) -> None:
        """Start writing the state that `copy` copied."""
        assert self._copied is not None
        self._thread = threading.Thread(target=self._save, args=self._copied, name="checkpoint", daemon=True)
        self._copied = None
        self._thread.start()

    def wait(self) -> None:
        """Wait until no save is running."""
        if not self._thread:
            return
        start = time.monotonic()
        while True:
            self._thread.join(REPORT_EVERY_S)
            if not self._thread.is_alive():
                break
            self._report(f"waiting for the checkpoint, {time.monotonic() - start:.1f} s")
        self._thread = None

    def result_of(self, step: int) -> Saved | None:
        """The result of the newest save if it has finished and saved step `step`, else None. A save fails on all ranks
        or on none."""
        if self._thread and self._thread.is_alive():
            return None
        return self._newest if self._newest and self._newest.step == step else None

    def take_finished(self) -> list[Saved]:
        """Results of the saves that finished since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _save(self, tensors: dict[str, Tensor], manifest: Manifest) -> None:
        """Write the files, complete the checkpoint on rank 0, and broadcast the result. Runs in a background thread."""
        start = time.monotonic()
        folder = self.checkpoints_dir / folder_name(manifest.step)
        partial = folder.with_name(folder.name + PARTIAL)
        sums: dict[str, int] = {}
        why, size = "", 0
        try:
            sums = self.write(tensors, partial)
        except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is not an Exception
            why = first_line(error)
        try:
            by_rank: list[tuple[dict[str, int], str]] = [({}, "")] * dist.get_world_size()
            dist.all_gather_object(by_rank, (sums, why), group=self._group)
            why = next((of_rank for _, of_rank in by_rank if of_rank), "")
            if self._leads and not why:
                try:
                    known = {name: value for of_rank, _ in by_rank for name, value in of_rank.items()}
                    size = sum(seal(partial, manifest, known).manifest.files.values())
                    prune(self.checkpoints_dir, self._settings.keep)
                except OSError as error:
                    why = first_line(error)
            result = [why]
            dist.broadcast_object_list(result, src=0, group=self._group)
            why = result[0]
        except Exception as error:  # noqa: BLE001 - another rank has died
            why = why or first_line(error)
        if why and self._leads:
            remove(partial)
        self._newest = Saved(manifest.step, folder, time.monotonic() - start, size, why)
        self._finished.append(self._newest)

    def write(self, tensors: dict[str, Tensor], partial: Path) -> dict[str, int]:
        """Write this rank's files and return their checksums. Returns when the files of all ranks are on disk."""
        writer = Writer(partial, self._rank)
        save(tensors, storage_writer=writer, process_group=self._group)
        return writer.sums


class SaveAcks:
    """Holds back the acks of changes that request a save, until the checkpoint is on disk or the save has failed. So if
    an operator requests only a save, the state `applied` means that the checkpoint is on disk."""

    def __init__(self, checkpoints: Checkpoints, settle: Callable[[Ack], None]):
        self._checkpoints, self._settle = checkpoints, settle
        self._held: list[tuple[Ack, bool]] = []
        self._leads = dist.get_rank() == 0

    def hold(self, ack: Ack, changes: Changes) -> None:
        """For a change that requests a save or another layout, hold back the ack `applied` until the save has finished;
        the leader sends the ack `agreed` now."""
        self._held.append((ack, len(changes) == 1))
        if self._leads:
            text = f"the checkpoint of step {ack.step} is being written"
            self._settle(structs.replace(ack, state="agreed", why=text))

    def settle_finished(self) -> None:
        """Send the acks that were held back until their save finished.

        After a failed save, the ack is still `applied` if the change also sets knobs, because the knobs have their new
        values.
        """
        for held in list(self._held):
            ack, alone = held
            saved = self._checkpoints.result_of(ack.step)
            if saved is None:
                continue
            self._held.remove(held)
            if saved.why:
                state: Literal["applied", "rejected"] = "rejected" if alone else "applied"
                ack = structs.replace(ack, state=state, why=clip(str(saved)))
            self._settle(ack)
