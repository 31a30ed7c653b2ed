"""The adapter for training loops that are written with Hugging Face Accelerate.

    from agents.loop.adapters.accelerate import watch
    watch(accelerator)  # after accelerator.prepare

A step is one update of the weights. A step ends when the loop requests the first batch after `optimizer.step` from a
prepared data loader, or calls `end_training`. The ranks vote on knob changes at the end of a step, because the loop has
then finished all work for the update.

The accelerator counts micro-batches, starting from zero in each pass over a data loader. `accelerator.accumulate` ends
an update when the number of micro-batches is a multiple of `gradient_accumulation_steps`. So a change of
`gradient_accumulation_steps` waits until the number of micro-batches is a multiple of the new value.
"""

import functools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from agents.loop.adapters import deepspeed
from agents.loop.adapters.expert_load import ExpertLoad
from agents.loop.adapters.knobs.learning_rate import LearningRate
from agents.loop.adapters.patches import Patches, follow
from agents.loop.adapters.saving import Save, save_requested
from agents.loop.adapters.torch_ranks import (
    TorchRanks,
    coordinates_of,
    device_number,
    memory_bytes,
    own_part,
    token_count,
)
from agents.loop.loop import CHECKPOINT, EVALUATION, PAUSE, Loop
from agents.loop.step import StepReport, discard

MOST = 1024  # highest legal accumulation
OWN_ACCUMULATION = ("DEEPSPEED", "MEGATRON_LM")  # distributed types that count micro-batches themselves


def watch(accelerator: Any, *, save: Save | None = None, **join: Any) -> Loop:
    """Connect the loop of `accelerator` to a hub. Call `watch` on all ranks, after `accelerator.prepare`.

    `save` is called with the number of completed updates and saves a checkpoint; the default is
    `accelerator.save_state` in the folder ``checkpoint-N`` of the project directory. `join`: further arguments for
    `agents.join`. Raises ValueError if the accelerator has no prepared optimizer or no prepared data loader.
    """
    if not accelerator._optimizers or not accelerator._dataloaders:
        raise ValueError(
            "watch() needs a prepared optimizer and data loader: call it after accelerator.prepare()"
        )
    ranks = TorchRanks()
    project = Path(accelerator.project_dir or Path.cwd())
    known = {"run": project.resolve().name[:64], "device": device_number(accelerator.device)}
    loop = ranks.join(axes_of(accelerator, ranks), known, join)
    _Watched(accelerator, ranks, loop, save or functools.partial(_save_state, accelerator, project))
    return loop


class _Watched:
    """One `Accelerator`, connected to a hub: wraps the methods that the training loop calls."""

    def __init__(self, accelerator: Any, ranks: TorchRanks, loop: Loop, save: Save) -> None:
        self._accelerator, self._ranks, self._loop, self._save_checkpoint = accelerator, ranks, loop, save
        self._learning_rate = LearningRate(*accelerator._optimizers)
        self._experts = ExpertLoad(accelerator._models[0], ranks)
        self._loss_scale = LossScale(accelerator)
        self._context_ranks = context_ranks(accelerator, ranks)
        self._context: AbstractContextManager[StepReport] | None = None
        self._report: StepReport | None = None
        self._losses: list[Any] = []  # losses of the micro-batches of this step, as tensors
        self._tokens, self._tokens_of_batch = 0, 0
        self._updates = 0
        self._updated = self._accumulates = self._saving = self._stopping = self._left = False
        self._loader: Any = None  # the loader whose batch is in use
        self._trains: set[int] = set()  # ids of the loaders whose batches the loop trains on
        self._patches = Patches()
        self._patch()
        self._declare()

    def _patch(self) -> None:
        accelerator, patches = self._accelerator, self._patches
        patches.wrap(accelerator, "accumulate", self._accumulate)
        patches.wrap(accelerator, "backward", self._backward)
        patches.wrap(accelerator, "clip_grad_norm_", self._clip_grad_norm)
        patches.wrap(accelerator, "end_training", self._end_training)
        for name in ("save_state", "save_model"):
            patches.operation(self._loop, accelerator, name, CHECKPOINT)
        for optimizer in accelerator._optimizers:
            patches.wrap(optimizer, "step", self._optimizer_step)
        for loader in accelerator._dataloaders:
            follow(loader, functools.partial(self._batches, loader))

    def _declare(self) -> None:
        loop, accelerator = self._loop, self._accelerator
        kind = accelerator.distributed_type.name
        if kind in OWN_ACCUMULATION:
            loop.event(f"no knob gradient_accumulation_steps: {kind} counts micro-batches itself")
        else:
            loop.knob(
                "gradient_accumulation_steps",
                int,
                (1, max(MOST, accelerator.gradient_accumulation_steps)),
                value=accelerator.gradient_accumulation_steps,
                apply=functools.partial(setattr, accelerator, "gradient_accumulation_steps"),
                loss_neutral=False,
                about="micro-batches per update; a new value waits until the micro-batch count is a multiple of it",
                waits=self._accumulation_waits,
            )
        self._learning_rate.declare(loop)
        loop.action("save", self._save, about="save a checkpoint after this step")
        loop.action("stop", self._stop, about="end the data loader after this step", ends=True)

    def _accumulation_waits(self, value: int) -> str:
        if not self._accumulates:
            raise ValueError(
                "the training loop does not use accelerator.accumulate, so nothing reads this value"
            )
        done = self._accelerator.step
        if done % value == 0:
            return ""
        return (
            f"{done} micro-batches are done; it takes effect after the next update that ends at a multiple of {value}, "
            "or at the end of the data loader"
        )

    def _save(self) -> None:
        self._saving = True

    def _stop(self) -> None:
        self._stopping = True

    # ------------------------------------------------------------------------------------------ data loaders

    def _batches(self, loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            self._end_step()
            if self._left:
                if not self._stopping or id(loader) not in self._trains:
                    yield from iterator
                return
            if self._evaluates(loader):
                self._loop.at(self._loop.doing[0], EVALUATION)
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                yield batch
                continue
            if self._report is None:
                self._context = self._loop.step(self._updates + 1)
                self._report = self._context.__enter__()
            elif self._loop.doing[1] == EVALUATION:
                self._loop.at(self._report.number, "step")
            try:
                with self._report.phase("data"):
                    batch = next(iterator)
            except StopIteration:
                self._discard_unused()
                return
            self._loader = loader
            self._tokens_of_batch = own_part(token_count(batch) or 0, *self._context_ranks)
            yield batch

    def _evaluates(self, loader: Any) -> bool:
        """Whether the loop uses the batches of `loader` for an evaluation. The mode of the models alone does not tell,
        because a loop may train a model in eval mode, which is the mode of loaded models of transformers."""
        trains = not self._trains or id(loader) in self._trains
        return not trains and not any(model.training for model in self._accelerator._models)

    def _discard_unused(self) -> None:
        """Discard the report of the current step if the loader ends before the step's first micro-batch, because an
        evaluation may follow."""
        if self._context and not self._losses:
            context, self._context, self._report = self._context, None, None
            discard(context)

    # ------------------------------------------------------------------------------------------ a step

    def _accumulate(self, original: Any, *models: Any) -> Any:
        self._accumulates = True
        return original(*models)

    def _backward(self, original: Any, loss: Any, **kwargs: Any) -> Any:
        if self._report is None:
            return original(loss, **kwargs)
        self._losses.append(loss.detach())
        self._tokens += self._tokens_of_batch
        self._tokens_of_batch = 0
        self._trains.add(id(self._loader))
        with self._report.phase("backward"):
            return original(loss, **kwargs)

    def _clip_grad_norm(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        if self._report and self._accelerator.sync_gradients:
            self._report.report(grad_norm=norm)
        return norm

    def _optimizer_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._report is None or not self._accelerator.sync_gradients:
            return original(*args, **kwargs)
        self._updated = True
        self._report.report(lr=self._learning_rate.current())
        with self._report.phase("optimizer"):
            result = original(*args, **kwargs)
        self._loop.quietly(functools.partial(self._loss_scale.report, self._report))
        self._loop.at(self._report.number, PAUSE)  # until the loop requests the next batch
        return result

    def _end_step(self) -> None:
        """If the loop has updated the weights, report the update, and vote with the other ranks on pending operator
        commands (knob changes, save, stop). Then save or stop if that was decided."""
        if not self._updated or not self._context or not self._report:
            return
        self._updates += 1
        # The collective part comes first, so that an error in the rest cannot make the ranks wait for each other.
        self._loop.quietly(self._report_experts)
        self._loop.quietly(self._report_step)
        context, self._context, self._report = self._context, None, None
        self._losses, self._tokens, self._updated = [], 0, False
        context.__exit__(None, None, None)
        if self._saving:
            self._saving = False
            save_requested(self._loop, self._ranks, self._save_checkpoint, self._updates)
        if self._stopping:
            self._leave()

    def _report_step(self) -> None:
        assert self._report
        # Accelerate divides each loss by the accumulation, and the gradients are averaged over ranks.
        loss = float(sum(self._losses)) / len(self._losses) if self._losses else None
        tokens = self._tokens or None
        self._report.report(loss=loss, loss_weight=1, tokens=tokens, memory_bytes=memory_bytes())

    def _report_experts(self) -> None:
        assert self._report
        self._experts.report(self._report)

    def _end_training(self, original: Any) -> Any:
        self._end_step()
        self._leave()
        return original()

    def _leave(self) -> None:
        """Disconnect this rank from the run; all ranks call this method. After the action `stop`, the data loaders of
        the training loop yield no further batches."""
        if not self._left:
            self._left = True
            self._patches.undo()
            self._experts.remove()
            self._learning_rate.remove()
            self._ranks.leave(self._loop)


class LossScale:
    """The factor on the loss of an `Accelerator` with fp16."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._scale = self._read()

    def report(self, report: StepReport) -> None:
        """Report, after the optimizer's step, the scale of this step and whether the scaler skipped the update."""
        if self._scale is not None:
            skipped = bool(self._accelerator.optimizer_step_was_skipped)
            report.report(loss_scale=self._scale, skipped=skipped)
            self._scale = self._read()

    def _read(self) -> float | None:
        scaler = self._accelerator.scaler
        if scaler is not None:
            return float(scaler.get_scale()) if scaler.is_enabled() else None
        if self._accelerator.mixed_precision != "fp16":
            return None
        scale = next((deepspeed.loss_scale(one.optimizer) for one in self._accelerator._optimizers), None)
        return None if scale is None else float(scale)


SIZES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")  # of Accelerate's `ParallelismConfig`, outermost first


def axes_of(accelerator: Any, ranks: TorchRanks) -> dict[str, int]:
    """The coordinates of this rank on the axes with more than one rank, in the order of Accelerate's device mesh."""
    engine = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
    if engine is not None:
        return deepspeed.axes_of(engine, ranks)
    return coordinates_of(ranks.rank, _sizes(accelerator, ranks))


def context_ranks(accelerator: Any, ranks: TorchRanks) -> tuple[int, int]:
    """The number of ranks that divide each sequence of a batch after the data loader, and this rank's place among
    them."""
    return _sizes(accelerator, ranks).get("cp", 1), axes_of(accelerator, ranks).get("cp", 0)


def _sizes(accelerator: Any, ranks: TorchRanks) -> dict[str, int]:
    config = getattr(accelerator, "parallelism_config", None)
    sizes = {name: int(getattr(config, f"{name}_size", None) or 1) for name in SIZES}
    # Without a `ParallelismConfig`, or if it has no data-parallel sizes, all other ranks have their own data.
    return {"dp": ranks.world // math.prod(sizes.values())} | sizes


def _save_state(accelerator: Any, project: Path, updates: int) -> object:
    if accelerator.project_configuration.automatic_checkpoint_naming:
        return accelerator.save_state()
    return accelerator.save_state(str(project / f"checkpoint-{updates}"))
