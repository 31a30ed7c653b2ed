"""Saves the checkpoints of a run when they are due, restores a checkpoint, and reports the results of saves, for the
trainer."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from agents.protocol import CHECKPOINT_STEP, RESUMED, Ack, Changes, Event, Facts
from agents.rank.agent import Agent
from engine.checkpoint.host_copy import HostCopy
from engine.checkpoint.manifest import Applied, Manifest
from engine.checkpoint.reading import read
from engine.checkpoint.restore_in_any_layout import restore
from engine.checkpoint.resume_point import other_data
from engine.checkpoint.save import Checkpoints, SaveAcks, Saved
from engine.checkpoint.state_tensors import State
from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.config.relayout import KNOB
from engine.control.vote import LEADER
from engine.metering.meter import Meter
from engine.train.computation import Computation
from engine.train.optimization.weight_average import AVERAGE


@dataclass(frozen=True)
class KnobState:
    """The knob values, the number of the last applied change (revision) and the history of changes, as a checkpoint
    stores them."""

    values: Changes
    revision: int
    history: list[Applied]


class Saving:
    """Saves a rank's `Computation` (weights, optimizer state) in checkpoints, and restores it from one. Without
    `checkpoints_dir`, nothing is saved.

    `given` is the layout as the user wrote it; `on_checkpoint` is called on rank 0 with the result of each save.
    """

    def __init__(
        self,
        layout: Layout,
        given: Layout,
        computation: Computation,
        meter: Meter,
        agent: Agent,
        checkpoints_dir: Path | None,
        knob_state: Callable[[], KnobState],
        on_checkpoint: Callable[[Saved], None],
    ):
        self._layout, self._given, self._computation = layout, given, computation
        self._meter, self._agent = meter, agent
        self._knob_state, self._on_checkpoint = knob_state, on_checkpoint
        self.checkpoints_dir = checkpoints_dir
        self._imported: dict[str, Any] | None = None  # `Manifest.huggingface` of the restored checkpoint
        self.checkpoints: Checkpoints | None = None
        self._acks: SaveAcks | None = None
        if checkpoints_dir:
            self.checkpoints = Checkpoints(
                checkpoints_dir,
                layout.checkpoint,
                self._state(),
                self._manifest,
                HostCopy(computation.world.device),
                self._anywhere,
                meter.set_operation,
            )
            self._acks = SaveAcks(self.checkpoints, agent.settle)

    @property
    def action(self) -> Callable[[Any], None] | None:
        """The function that requests a checkpoint; every rank calls it when an operator's action `save` is applied.
        None if the run saves no checkpoints."""
        return self.checkpoints.request if self.checkpoints else None

    def request(self, signalled: bool) -> None:
        """If `signalled`, that is, if a signal requested a checkpoint, save at the end of this step. `signalled` must
        be equal on all ranks."""
        if self.checkpoints and signalled:
            self.checkpoints.request()
            if self._leads:
                text = "a signal requests a checkpoint"
                self._agent.send(Event(time.time(), "info", "engine", text))

    def restore(self, folder: Path) -> Manifest:
        """Load the checkpoint in `folder` and return its manifest. Raises LayoutError if the checkpoint's training text
        differs from the text of this run."""
        checkpoint = read(folder)
        manifest = checkpoint.manifest
        if refusal := other_data(checkpoint, self._layout, self._computation.corpus.digest):
            raise LayoutError(refusal)
        self._imported = manifest.huggingface
        # A run may begin to average its weights when it resumes; the average then starts from the weights of
        # the checkpoint.
        averaged = manifest.layout.train.ema is not None and not manifest.weights_only
        begins = self._computation.average is not None and not averaged
        restore(checkpoint, self._state(), without=f"optimizer.{AVERAGE}." if begins else None)
        if begins and self._computation.average:
            self._computation.average.restart()
        self._computation.loss_scaler.restore(
            manifest.loss_scale, manifest.good_steps, manifest.skipped_steps
        )
        if self._leads:
            text = f"resumed from {checkpoint.folder}, at revision {manifest.revision} of the knobs"
            facts: Facts = {CHECKPOINT_STEP: manifest.step, RESUMED: True}
            self._agent.send(Event(time.time(), "info", "engine", text, facts))
        return manifest

    def save_if_due(self, done: int, last: bool) -> None:
        """Start a save if one is due after `done` steps; `last` is True if this was the last step of the run. The files
        are written after `write`."""
        if self.checkpoints and self.checkpoints.due(done, last):
            with self._meter.phase("checkpoint"):
                self.checkpoints.copy(done)

    @property
    def copied(self) -> bool:
        """Whether `save_if_due` has started a save that waits for `write`; equal on all ranks."""
        return self.checkpoints is not None and self.checkpoints.copied

    def write(self) -> None:
        """Write the checkpoint that `save_if_due` has started, in the background. Call this after the step's summary
        has been sent."""
        if self.checkpoints:
            self.checkpoints.start()

    def save_while_paused(self, done: int, last: bool) -> None:
        """During a pause, start a save if an operator requested one, or if the run is about to end and a save is
        due."""
        if self.checkpoints and (self.checkpoints.requested or last) and self.checkpoints.due(done, last):
            self.checkpoints.save(done)

    def hold_ack(self, ack: Ack, changes: Changes) -> bool:
        """If the change requested a save or another layout, delay the ack (the acknowledgement of the change) until the
        save has finished. Returns False if the ack is not delayed."""
        if self._acks is None or not {"save", KNOB} & changes.keys():
            return False
        self._acks.hold(ack, changes)
        return True

    def report(self) -> None:
        """Report finished saves: rank 0 sends an event for each and calls `on_checkpoint`; every rank sends the acks
        that it held back until the save finished."""
        for saved in self.checkpoints.take_finished() if self.checkpoints else ():
            if self._leads:
                self._on_checkpoint(saved)
                level = _level(saved)
                facts: Facts = {} if saved.why else {CHECKPOINT_STEP: saved.step}
                self._agent.send(Event(time.time(), level, "engine", str(saved), facts))
        if self._acks:
            self._acks.settle_finished()

    def unsaved(self, done: int) -> bool:
        """Whether the save after `done` steps failed."""
        saved = self.checkpoints.result_of(done) if self.checkpoints else None
        return bool(saved and saved.why)

    def wait(self) -> None:
        """Wait until no save is in progress."""
        if self.checkpoints:
            self.checkpoints.wait()

    @property
    def _leads(self) -> bool:
        return self._computation.world.rank == LEADER

    def _anywhere(self, here: bool) -> bool:
        return bool(self._computation.world.control.all_reduce(torch.tensor(int(here))))

    def _state(self) -> State:
        computation = self._computation
        model = self._layout.model
        copies = 2 if (model.tie_embeddings or model.mtp_layers) and self._layout.stages > 1 else 1
        return State(
            computation.stages,
            computation.optimizer,
            computation.world,
            computation.shards.compression,
            copies,
        )

    def _manifest(self, done: int) -> Manifest:
        knobs, scaler = self._knob_state(), self._computation.loss_scaler
        return Manifest(
            step=done,
            run=self._layout.run.name,
            layout=self._given,
            data=self._computation.corpus.digest,
            knobs=knobs.values,
            revision=knobs.revision,
            history=knobs.history,
            torch=str(torch.__version__),
            loss_scale=scaler.scale if scaler.settings else None,
            good_steps=scaler.good_steps,
            skipped_steps=scaler.skipped,
            huggingface=self._imported,
        )


def _level(saved: Saved) -> Literal["info", "warning", "error"]:
    if saved.skipped:
        return "warning"
    return "error" if saved.why else "info"
