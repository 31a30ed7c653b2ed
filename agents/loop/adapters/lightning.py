"""The adapter for Lightning's `Trainer`.

    from agents.loop.adapters.lightning import cockpit_callback
    trainer = Trainer(..., callbacks=[cockpit_callback()])

`Trainer` ends an update when the number of completed batches in the epoch is a multiple of `accumulate_grad_batches`.
So a change of `accumulate_grad_batches` waits until the number of completed batches is a multiple of the new value, or
until the epoch ends.
"""

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from agents.loop.adapters.expert_load import ExpertLoad
from agents.loop.adapters.knobs.learning_rate import LearningRate
from agents.loop.adapters.patches import Patches
from agents.loop.adapters.saving import save_requested
from agents.loop.adapters.torch_ranks import (
    TorchRanks,
    coordinates_of,
    device_number,
    memory_bytes,
    token_count,
)
from agents.loop.loop import CHECKPOINT, EVALUATION, PAUSE, Loop
from agents.loop.step import StepReport, discard

AXES = {"data_parallel": "dp", "tensor_parallel": "tp"}  # of the device mesh of `ModelParallelStrategy`
PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # the two names under which Lightning is installed
MOST = 1024  # highest legal accumulation if the number of batches in an epoch is unknown
BETWEEN = "data, callbacks"  # phase between two batches; other callbacks also run there


def cockpit_callback(**join: Any) -> Any:
    """A callback that connects each `fit` of Lightning's `Trainer` to a hub. Call `cockpit_callback` after Lightning is
    imported.

    `join`: further arguments for `agents.join`, such as `run` (the default is the name of the module's class). All
    ranks pass the same arguments. Steps are numbered like `trainer.global_step`: the first update is step 1.
    """
    name = next((one for one in PACKAGES if one in sys.modules), None)
    if name is None:
        raise ValueError(f"cockpit_callback() needs Lightning: import {' or '.join(PACKAGES)} before it")
    base = sys.modules[name].Callback
    return type("CockpitCallback", (_Hooks, base), {})(join)


class _Hooks:
    """The methods that Lightning's `Trainer` calls during training. `Trainer` accepts only subclasses of Lightning's
    `Callback`, so `cockpit_callback` derives a class from `_Hooks` and `Callback`.
    """

    def __init__(self, join: dict[str, Any]) -> None:
        super().__init__()
        self._join = join
        self._fit: _Fit | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        ranks = TorchRanks()
        known = {"run": type(pl_module).__name__[:64], "device": device_number(pl_module.device)}
        loop = ranks.join(_axes(trainer.strategy, ranks), known, self._join)
        self._fit = _Fit(trainer, pl_module, ranks, loop)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit:
            self._fit.open()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit:
            self._fit.begin_evaluation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit:
            self._fit.open()
            self._fit.phase(BETWEEN)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._fit:
            self._fit.begin_batch(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self._fit:
            self._fit.phase("backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._fit:
            self._fit.begin_update()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit:
            self._fit.end_batch(outputs)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit:
            self._fit.discard_unused()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit:
            self._fit.close()
        self._fit = None


class _Fit:
    """One call of `Trainer.fit`, connected to a hub from `on_train_start` on."""

    def __init__(self, trainer: Any, module: Any, ranks: TorchRanks, loop: Loop) -> None:
        self._trainer, self._ranks, self._loop = trainer, ranks, loop
        self._learning_rate = LearningRate(*trainer.optimizers)
        self._experts = ExpertLoad(module, ranks)
        self._context: AbstractContextManager[StepReport] | None = None
        self._report: StepReport | None = None
        self._phase: AbstractContextManager[None] | None = None
        self._losses: list[Any] = []  # losses of the micro-batches of this step, as tensors
        self._tokens = self._batches = 0
        self._updates = trainer.global_step
        self._saving = False
        self._patches = Patches()
        self._patches.operation(loop, trainer, "save_checkpoint", CHECKPOINT)
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)  # with fp16
        self._scale = self._read_scale()
        self._declare(module)

    def _declare(self, module: Any) -> None:
        loop, trainer = self._loop, self._trainer
        batches = trainer.num_training_batches
        if not module.automatic_optimization or trainer.strategy.handles_gradient_accumulation:
            loop.event(
                "no knob accumulate_grad_batches: the module or its strategy counts micro-batches itself"
            )
        else:
            loop.knob(
                "accumulate_grad_batches",
                int,
                (1, max(batches if isinstance(batches, int) else MOST, trainer.accumulate_grad_batches)),
                value=trainer.accumulate_grad_batches,
                apply=self._set_accumulation,
                loss_neutral=False,
                about="micro-batches per update; a new value waits until the epoch's count is a multiple of it",
                waits=self._accumulation_waits,
            )
        self._learning_rate.declare(loop)
        loop.action("save", self._save, about="save a checkpoint after this step")
        loop.action("stop", self._stop, about="end training after this step", ends=True)

    def _set_accumulation(self, value: int) -> None:
        self._trainer.accumulate_grad_batches = value

    def _accumulation_waits(self, value: int) -> str:
        done = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if done % value == 0 or self._trainer.is_last_batch:
            return ""
        return (
            f"{done} micro-batches of this epoch are done; it takes effect after the next update that ends at a "
            f"multiple of {value}, or at the end of the epoch"
        )

    def _save(self) -> None:
        self._saving = True

    def _stop(self) -> None:
        self._trainer.should_stop = True

    def open(self) -> None:
        """If no step is being reported, begin one before its first batch is loaded."""
        if self._report is None:
            self._context = self._loop.step(self._updates + 1)
            self._report = self._context.__enter__()
            self.phase(BETWEEN)

    def phase(self, name: str | None) -> None:
        """End the current phase of the step and begin the phase `name`, if any."""
        phase, self._phase = self._phase, None
        if phase:
            phase.__exit__(None, None, None)
        if name and self._report:
            self._phase = self._report.phase(name, PAUSE if name == BETWEEN else "")
            self._phase.__enter__()

    def begin_batch(self, batch: Any) -> None:
        self.open()
        self._batches += 1
        self._tokens += token_count(batch) or 0
        self.phase("forward")

    def begin_update(self) -> None:
        if self._report:
            self._report.report(lr=self._learning_rate.current())
        self.phase("optimizer")

    def end_batch(self, outputs: Any) -> None:
        """If the batch ended an update, report the update, vote with the other ranks on pending operator commands (such
        as a knob change or a save), save if that was decided, and begin the next step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._losses.append(loss)
        if self._trainer.global_step == self._updates or not self._context or not self._report:
            self.phase(BETWEEN)
            return
        self.phase(None)
        self._updates = self._trainer.global_step
        # The collective part comes first, so that an error in the rest cannot make the ranks wait for each other.
        self._loop.quietly(self._report_experts)
        self._loop.quietly(self._report_step)
        self._loop.quietly(self._report_scale)
        context, self._context, self._report = self._context, None, None
        self._losses, self._tokens, self._batches = [], 0, 0
        context.__exit__(None, None, None)
        if self._saving:
            self._saving = False
            save_requested(self._loop, self._ranks, self._save_checkpoint, self._updates)
        self.open()

    def _report_step(self) -> None:
        assert self._report
        # Lightning has divided each loss by the accumulation, and the gradients are averaged over ranks.
        loss = float(sum(self._losses)) if self._losses else None
        tokens = self._tokens or None
        self._report.report(loss=loss, loss_weight=1, tokens=tokens, memory_bytes=memory_bytes())

    def _report_scale(self) -> None:
        assert self._report
        before, self._scale = self._scale, self._read_scale()
        if before is not None and self._scale is not None:
            self._report.report(loss_scale=before, skipped=self._scale < before)

    def _read_scale(self) -> float | None:
        return float(self._scaler.get_scale()) if self._scaler is not None else None

    def _report_experts(self) -> None:
        assert self._report
        self._experts.report(self._report)

    def _save_checkpoint(self, updates: int) -> Path:
        file = Path(self._trainer.default_root_dir) / "checkpoints" / f"step={updates}.ckpt"
        self._trainer.save_checkpoint(file)
        return file

    def begin_evaluation(self) -> None:
        self.discard_unused()
        self.phase(None)
        self._loop.at(self._loop.doing[0], EVALUATION)

    def discard_unused(self) -> None:
        """At the end of an epoch or before validation, discard the report of the current step if the step has no batch
        yet."""
        if self._context and not self._batches:
            self.phase(None)
            context, self._context, self._report = self._context, None, None
            discard(context)

    def close(self) -> None:
        self._batches = 0
        self.discard_unused()
        self._experts.remove()
        self._learning_rate.remove()
        self._patches.undo()
        self._ranks.leave(self._loop)


def _axes(strategy: Any, ranks: TorchRanks) -> dict[str, int]:
    """The coordinates of this rank on the axes with more than one rank."""
    mesh = getattr(strategy, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if set(names) != set(AXES):  # another mesh, such as that of FSDP, divides only data
        return coordinates_of(ranks.rank, {"dp": ranks.world})
    sizes = {AXES[name]: mesh.size(place) for place, name in enumerate(names)}  # type: ignore[union-attr]
    return {axis: at for axis, at in zip(sizes, mesh.get_coordinate(), strict=True) if sizes[axis] > 1}  # type: ignore[union-attr]
