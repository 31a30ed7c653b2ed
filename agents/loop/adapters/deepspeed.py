"""The adapter for training loops that are written with DeepSpeed.

    from agents.loop.adapters.deepspeed import watch
    watch(engine, loader)  # after deepspeed.initialize

A step is one update of the weights. A step ends in the call to `engine.step` that updates the weights; in this call,
the ranks also vote on knob changes.

The engine counts micro-batches (`micro_steps`) from zero at the start of the program, and ends an update when
`micro_steps` is a multiple of the number of accumulation steps. So a change of the number of accumulation steps waits
until `micro_steps` is a multiple of the new number.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from agents.loop.adapters.expert_load import ExpertLoad, moe_layers
from agents.loop.adapters.knobs.learning_rate import LearningRate
from agents.loop.adapters.patches import Patches, follow
from agents.loop.adapters.saving import Save, save_requested
from agents.loop.adapters.torch_ranks import TorchRanks, device_number, memory_bytes, token_count
from agents.loop.loop import CHECKPOINT, EVALUATION, PAUSE, Loop
from agents.loop.step import StepReport, discard

MOST = 1024  # highest legal accumulation
CAPACITY = (0.05, 64.0)  # legal capacity factors
BETWEEN = "data, own code"  # phase between an `engine.step` and the next forward pass


def watch(engine: Any, loader: Any = None, *, save: Save | None = None, **join: Any) -> Loop:
    """Connect the loop of a `DeepSpeedEngine` to a hub. Call `watch` on all ranks, after `deepspeed.initialize`.

    `loader`: the loop's data loader, which yields no further batches after the action `stop`; the default is
    `engine.training_dataloader`. `stop` does not end iterators that were created before this call. `save` is called
    with the number of completed updates and saves a checkpoint; the default is `engine.save_checkpoint` in the folder
    ``checkpoints``. `join`: further arguments for `agents.join`. Raises ValueError if the engine is a `PipelineEngine`
    or has no optimizer.
    """
    if hasattr(engine, "train_batch"):
        raise ValueError("watch() does not work with a PipelineEngine, which schedules micro-batches itself")
    if not getattr(engine.optimizer, "param_groups", None):
        raise ValueError("watch() needs an engine with an optimizer: pass one to deepspeed.initialize()")
    ranks = TorchRanks()
    known = {"run": Path.cwd().name[:64] or "deepspeed", "device": device_number(engine.device)}
    loop = ranks.join(axes_of(engine, ranks), known, join)
    loader = engine.training_dataloader if loader is None else loader
    _Watched(engine, loader, ranks, loop, save)
    return loop


class _Watched:
    """One DeepSpeed engine, connected to a hub: wraps the methods that its training loop calls."""

    def __init__(self, engine: Any, loader: Any, ranks: TorchRanks, loop: Loop, save: Save | None) -> None:
        self._engine, self._ranks, self._loop = engine, ranks, loop
        self._save_checkpoint = save or self._save_in_folder
        self._learning_rate = LearningRate(engine.optimizer)
        self._experts = ExpertLoad(engine.module, ranks)
        self._context: AbstractContextManager[StepReport] | None = None
        self._report: StepReport | None = None
        self._between: AbstractContextManager[None] | None = None
        self._losses: list[Any] = []  # losses of the micro-batches of this step, as tensors
        self._tokens = 0
        self._saving = self._stopping = self._left = False
        self._patches = Patches()
        self._patches.wrap(engine, "forward", self._forward)
        self._patches.wrap(engine, "backward", self._backward)
        self._patches.wrap(engine, "step", self._step)
        self._patches.wrap(engine, "destroy", self._destroy)
        for name in ("save_checkpoint", "save_16bit_model"):
            self._patches.operation(loop, engine, name, CHECKPOINT)
        self._declare(stoppable=loader is not None and follow(loader, self._batches))

    def _declare(self, stoppable: bool) -> None:
        loop, engine = self._loop, self._engine
        if why := _own_accumulation(engine):
            loop.event(f"no knob gradient_accumulation_steps: {why}")
        else:
            loop.knob(
                "gradient_accumulation_steps",
                int,
                (1, max(MOST, engine.gradient_accumulation_steps())),
                value=engine.gradient_accumulation_steps(),
                apply=self._set_accumulation,
                loss_neutral=False,
                about="micro-batches per update; a new value waits until the micro-batch count is a multiple of it",
                waits=self._accumulation_waits,
            )
        self._learning_rate.declare(loop)
        self._declare_capacity()
        loop.action("save", self._save, about="save a checkpoint after this step")
        if stoppable:
            loop.action("stop", self._stop, about="end the data loader after this step", ends=True)
        else:
            loop.event("no action stop: pass the loop's data loader, such as a torch DataLoader, to watch()")

    def _declare_capacity(self) -> None:
        gates = [gate for layer in moe_layers(self._engine.module) if (gate := _limited_gate(layer))]
        factors = {float(gate.capacity_factor) for gate in gates}
        if len(factors) > 1:
            self._loop.event("no knob capacity_factor: the MoE layers have different capacity factors")
        elif factors:
            (value,) = factors

            def set_factor(factor: float) -> None:
                for gate in gates:
                    gate.capacity_factor = factor

            self._loop.knob(
                "capacity_factor",
                float,
                (min(value, CAPACITY[0]), max(value, CAPACITY[1])),
                value=value,
                apply=set_factor,
                loss_neutral=False,
                about="capacity of each expert in training, relative to a uniform load",
            )

    def _set_accumulation(self, value: int) -> None:
        engine = self._engine
        per_micro_batch = engine.train_batch_size() // engine.gradient_accumulation_steps()
        engine.set_train_batch_size(per_micro_batch * value)
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):
            engine.optimizer.gradient_accumulation_steps = value  # ZeRO's optimizer has a copy

    def _accumulation_waits(self, value: int) -> str:
        if self._engine._is_gradient_accumulation_boundary is not None:
            raise ValueError(
                "the program calls set_gradient_accumulation_boundary, so it counts micro-batches itself"
            )
        done = self._engine.micro_steps
        if done % value == 0:
            return ""
        return f"{done} micro-batches are done; it takes effect after an update that ends at a multiple of {value}"

    def _save(self) -> None:
        self._saving = True

    def _stop(self) -> None:
        self._stopping = True

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            yield batch
            if self._stopping and self._left:
                return

    # ------------------------------------------------------------------------------------------ a step

    def _open(self) -> StepReport:
        """End the pause before this part of a step, and return the report of the step. If no step is being reported,
        begin one first."""
        if self._report is None:
            self._context = self._loop.step(self._engine.global_steps + 1)
            self._report = self._context.__enter__()
        self._end_between()
        if self._loop.doing[1] == EVALUATION:
            self._loop.at(self._report.number, "step")
        return self._report

    def _end_between(self) -> None:
        phase, self._between = self._between, None
        if phase:
            phase.__exit__(None, None, None)

    def _forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._engine.module.training:
            self._loop.at(self._loop.doing[0], EVALUATION)
            return original(*args, **kwargs)
        report = self._open()
        self._tokens += token_count(kwargs) or (token_count(args[0]) if args else None) or 0
        with report.phase("forward"):
            return original(*args, **kwargs)

    def _backward(self, original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        report = self._open()
        if hasattr(loss, "detach"):
            self._losses.append(loss.detach())
        with report.phase("backward"):
            return original(loss, *args, **kwargs)

    def _step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        report = self._open()
        updates = self._engine.global_steps
        rate, scale = self._learning_rate.current(), self._scale()
        with report.phase("optimizer"):
            result = original(*args, **kwargs)
        if self._engine.global_steps > updates:
            report.report(lr=rate)
            if scale is not None:
                report.report(loss_scale=scale, skipped=getattr(self._engine.optimizer, "overflow", False))
            self._end_step()
        if not self._left:
            self._between = self._open().phase(BETWEEN, PAUSE)
            self._between.__enter__()
        return result

    def _scale(self) -> Any:
        return loss_scale(self._engine.optimizer) if self._engine.fp16_enabled() else None

    def _end_step(self) -> None:
        """Report the update that has just ended, and vote with the other ranks on pending operator commands (knob
        changes, save, stop). Then save or stop if that was decided."""
        # The collective part comes first, so that an error in the rest cannot make the ranks wait for each other.
        self._loop.quietly(self._report_experts)
        self._loop.quietly(self._report_step)
        context, self._context, self._report = self._context, None, None
        self._losses, self._tokens = [], 0
        if context:
            context.__exit__(None, None, None)
        if self._saving:
            self._saving = False
            save_requested(self._loop, self._ranks, self._save_checkpoint, self._engine.global_steps)
        if self._stopping:
            self._leave()

    def _report_step(self) -> None:
        assert self._report
        # DeepSpeed divides each loss by the accumulation, and averages the gradients over ranks.
        loss = float(sum(self._losses)) / len(self._losses) if self._losses else None
        norm = self._engine.get_global_grad_norm()
        if norm is not None and norm < 0:  # ZeRO's value for a norm that is not finite
            norm = math.nan
        tokens = self._tokens or None
        self._report.report(
            loss=loss, loss_weight=1, tokens=tokens, grad_norm=norm, memory_bytes=memory_bytes()
        )

    def _report_experts(self) -> None:
        assert self._report
        self._experts.report(self._report)

    def _save_in_folder(self, updates: int) -> object:
        folder = Path.cwd() / "checkpoints"
        self._engine.save_checkpoint(str(folder), tag=f"global_step{updates}")
        return folder / f"global_step{updates}"

    def _destroy(self, original: Any) -> Any:
        self._leave()
        return original()

    def _leave(self) -> None:
        """Disconnect this rank from the run, and discard the report of the step that is in progress. All ranks call
        this method. After the action `stop`, the data loader yields no batches."""
        if self._left:
            return
        self._left = True
        self._end_between()
        context, self._context, self._report = self._context, None, None
        discard(context)
        self._patches.undo()
        self._experts.remove()
        self._learning_rate.remove()
        self._ranks.leave(self._loop)


def loss_scale(optimizer: Any) -> Any:
    """The factor on the loss in DeepSpeed's optimizer for fp16; None if it has none."""
    config = getattr(optimizer, "loss_scale_config", None)
    return (
        config.cur_scale
        if config
        else getattr(optimizer, "cur_scale", getattr(optimizer, "loss_scale", None))
    )


# Names that DeepSpeed and Megatron's `mpu` have for the ranks that divide a model or a sequence.
MODEL_AXES = {
    "pp": ("pipeline_model_parallel", "pipe_parallel"),
    "sp": ("sequence_parallel",),
    "tp": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
}


def axes_of(engine: Any, ranks: TorchRanks) -> dict[str, int]:
    """The coordinates of this rank on the axes with more than one rank. The ranks of `tp` have the same tokens; those
    of `sp` (Ulysses) have different parts of each sequence."""
    mpu, coords, inner = engine.mpu, {}, 1
    for axis, names in MODEL_AXES.items():
        name = next((name for name in names if hasattr(mpu, f"get_{name}_world_size")), None)
        if name:
            size, at = getattr(mpu, f"get_{name}_world_size")(), getattr(mpu, f"get_{name}_rank")()
        else:  # without an mpu, sequences may be divided over neighbouring ranks
            size = getattr(engine, "sequence_parallel_size", 1) if axis == "sp" else 1
            at = ranks.rank % size
        if size > 1:
            coords[axis] = int(at)
            inner *= size
    if ranks.world == inner:
        return coords
    known = getattr(mpu, "get_data_parallel_rank", None)
    return {"dp": int(known()) if known else ranks.rank // inner} | coords


def _own_accumulation(engine: Any) -> str:
    """Why the number of accumulation steps of this engine cannot change; "" if it can."""
    if getattr(engine, "zenflow", False):
        return "ZenFlow decides itself when weights are updated"
    if hasattr(engine, "managed_gradient_accumulation") and not engine.managed_gradient_accumulation():
        return "the program decides itself when weights are updated (managed_gradient_accumulation = false)"
    return ""


def _limited_gate(layer: Any) -> Any:
    """The gate of a MoE layer; None if the gate does not drop tokens above its capacity."""
    gate = getattr(layer, "gate", None)
    return gate if getattr(gate, "drop_tokens", False) and hasattr(gate, "capacity_factor") else None
