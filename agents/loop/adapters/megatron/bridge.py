"""The adapter for `pretrain` and `finetune` of Megatron-Bridge.

    from agents.loop.adapters.megatron.bridge import CockpitCallback
    pretrain(config, forward_step, callbacks=[CockpitCallback()])

For each event, Megatron-Bridge calls the callback's method of the same name. The training loop of Megatron-Bridge sets
the number of micro-batches in the function `update_num_microbatches`, which the adapter wraps.
"""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

import agents
from agents.loop.adapters.knobs.learning_rate import LearningRate
from agents.loop.adapters.megatron.experts import RoutingMaps
from agents.loop.adapters.megatron.forward_knobs import declare_forward_knobs
from agents.loop.adapters.megatron.micro_batches import MicroBatches
from agents.loop.adapters.megatron.parts import axes_of, captured, counts_tokens, device_of
from agents.loop.adapters.patches import Patches
from agents.loop.adapters.torch_ranks import TorchRanks, memory_bytes
from agents.loop.loop import CHECKPOINT, EVALUATION, Loop
from agents.loop.step import StepReport
from agents.protocol import CHECKPOINT_STEP
from agents.rank.vote import LEADER

LOOP = "megatron.bridge.training.train"  # the module of the training loop
FORWARD_BACKWARD = "data, forward, backward"


class CockpitCallback:
    """Connects a Megatron-Bridge training run to a hub. Every rank passes such a callback to `pretrain` or `finetune`.

    `join`: other arguments of `agents.join`, such as `run` (by default the name of the folder `config.checkpoint.save`,
    or else of the working directory). Steps are numbered like Megatron's iterations: the first is step 1.
    """

    def __init__(self, **join: Any) -> None:
        self._join = join
        self._training: _Training | None = None

    def on_train_start(self, context: Any) -> None:
        self._training = _Training(context, self._join)

    def on_train_step_start(self, context: Any) -> None:
        if self._training:
            self._training.begin_step()

    def on_train_step_end(self, context: Any) -> None:
        if self._training:
            self._training.end_step(context)

    def on_eval_start(self, context: Any) -> None:
        if self._training:
            self._training.begin_evaluation()

    def on_eval_end(self, context: Any) -> None:
        if self._training:
            self._training.end_evaluation()

    def on_train_end(self, context: Any) -> None:
        if self._training:
            self._training.leave()
        self._training = None


class _Options:
    """Values of Megatron-Bridge's configuration, by the names of Megatron-LM's options."""

    rank = 0  # of the calculator of micro-batches, which only prints there
    perform_rl_step = False

    def __init__(self, config: Any) -> None:
        self._train = config.train
        self.micro_batch_size = int(config.train.micro_batch_size)
        self.dataloader_type = getattr(config.dataset, "dataloader_type", None)
        self.rampup_batch_size = getattr(config.train, "rampup_batch_size", None)
        self.step_batch_size_schedule = getattr(config.train, "step_batch_size_schedule", None)

    @property
    def train_iters(self) -> int:
        return int(self._train.train_iters)

    @train_iters.setter
    def train_iters(self, value: int) -> None:
        self._train.train_iters = value


class _Training:
    """One call of Megatron-Bridge's `train`, connected to a hub. `context`: the argument of `on_train_start`."""

    def __init__(self, context: Any, join: dict[str, Any]) -> None:
        self._config, self._state = context.state.cfg, context.state.train_state
        self._optimizer, self._ranks, self._patches = context.optimizer, TorchRanks(), Patches()
        model = context.model
        config = import_module("megatron.core.utils").get_model_config(model[0])
        mpu = import_module("megatron.core.parallel_state")
        # With process groups of its own (`dist.use_decentralized_pg`), Megatron's coordinates are unknown.
        known = bool(mpu.model_parallel_is_initialized())
        self._counts_tokens = known and counts_tokens(mpu)
        self._context_ranks = int(mpu.get_context_parallel_world_size()) if known else 1
        self._sequence = int(getattr(self._config.model, "seq_length", None) or 0)
        self._loop = self._join_run(
            join, axes_of(mpu) if known else {"dp": self._ranks.rank}, device_of(model)
        )
        self._report: StepReport | None = None
        self._phase: AbstractContextManager[None] | None = None
        self._start = 0.0
        self._evaluation: AbstractContextManager[None] | None = None
        self._step = int(self._state.step)  # number of the last step
        self._interval: tuple[Any] | None = None  # the interval of checkpoints, while another one is set
        self._options = _Options(self._config)
        self._captured = captured(config) if known else "the process groups are decentralized"
        self._micro_batches = MicroBatches(self._options, config, len(model))
        self._experts = RoutingMaps(model, config, mpu, self._ranks, self._patches, self._captured)
        self._patches.wrap(self._optimizer, "step", self._optimizer_step)
        self._patches.operation(self._loop, sys.modules.get(LOOP), "save_checkpoint_and_time", CHECKPOINT)
        self._fp16 = bool(getattr(config, "fp16", False))
        self._scale = float(self._optimizer.get_loss_scale()) if self._fp16 else None
        self._rates = LearningRate(self._optimizer)
        self._declare(model, config)

    def _join_run(self, join: dict[str, Any], axes: dict[str, int], device: int | None) -> Loop:
        config, ranks = self._config, self._ranks
        known: dict[str, Any] = {
            "run": Path(config.checkpoint.save or Path.cwd()).resolve().name[:64] or "megatron",
            "axes": axes,
            "device": device,
            "facts": {"steps": int(config.train.train_iters)},
        }
        return agents.join(
            rank=ranks.rank, world=ranks.world, agree=ranks.agree, first_step=1, **(known | join)
        )

    def _declare(self, model: list[Any], config: Any) -> None:
        loop, refusal = self._loop, self._micro_batches.refusal or self._captured
        module = sys.modules.get(LOOP)
        if not hasattr(module, "update_num_microbatches"):
            refusal = refusal or "this version has another training loop"
        if self._options.dataloader_type == "batch":
            refusal = refusal or 'the data loader "batch" divides batches of a fixed size'
        if refusal:
            self._log(f"no knob num_microbatches: {refusal}")
        else:
            self._patches.wrap(module, "update_num_microbatches", self._update_num_microbatches)
            self._micro_batches.declare(loop, self._set_micro_batches)
        self._rates.declare(loop)
        if self._captured:
            self._log(f"no knobs of the forward pass and no expert load: {self._captured}")
        else:
            declare_forward_knobs(loop, self._config.dist, model, config, self._log)
        if self._config.checkpoint.save:
            loop.action("save", self._save, about="save a checkpoint after this step")
        else:
            self._log("no action save: checkpoint.save is not set")
        loop.action("stop", self._stop, about="end training after this step", ends=True)

    def _set_micro_batches(self, value: int) -> None:
        ends = self._micro_batches.request(value, self._step)
        if ends is not None:
            self._log(f"training now ends after step {ends}, where its data end")

    def _save(self) -> None:
        """Make the loop save after this step, by setting `save_interval` to the number of this step."""
        checkpoint = self._config.checkpoint
        self._interval, checkpoint.save_interval = (checkpoint.save_interval,), self._step
        self._log(f"saves a checkpoint of step {self._step}", **{CHECKPOINT_STEP: self._step})

    def _stop(self) -> None:
        self._config.train.train_iters = self._step

    def _log(self, text: str, **facts: Any) -> None:
        if self._ranks.rank == LEADER:
            self._loop.event(text, facts=facts)

    # ------------------------------------------------------------------------------------------ a step

    def begin_step(self) -> None:
        if self._interval:
            (self._config.checkpoint.save_interval,) = self._interval
            self._interval = None
        self._step = int(self._state.step) + 1
        self._report = self._loop.begin(self._step)
        self._start = time.perf_counter()
        self._loop.quietly(self._begin_phases)

    def _begin_phases(self) -> None:
        assert self._report
        groups = self._optimizer.param_groups
        self._report.report(lr=groups[0]["lr"] * self._rates.scale if groups else None)
        self._phase = self._report.phase(FORWARD_BACKWARD)
        self._phase.__enter__()

    def _end_phase(self) -> None:
        phase, self._phase = self._phase, None
        if phase:
            phase.__exit__(None, None, None)

    def _optimizer_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._end_phase()
        if not self._report:
            return original(*args, **kwargs)
        with self._report.phase("optimizer"):
            return original(*args, **kwargs)

    def end_step(self, context: Any) -> None:
        report, self._report = self._report, None
        if not report:
            return
        self._end_phase()
        # The collective part comes first, so that an error in the rest cannot make the ranks wait for each other.
        self._loop.quietly(lambda: self._experts.report(report))
        self._loop.quietly(lambda: self._note(report, context))
        self._loop.end(report, 1e3 * (time.perf_counter() - self._start))

    def _note(self, report: StepReport, context: Any) -> None:
        losses = context.loss_dict
        if losses:  # on the last pipeline stage: means over the batch of all ranks
            report.report(loss=losses.get("lm loss", next(iter(losses.values()))), loss_weight=1)
        if self._counts_tokens and self._sequence:
            samples = self._micro_batches.value * self._options.micro_batch_size
            report.report(tokens=samples * self._sequence // self._context_ranks)
        report.report(grad_norm=context.grad_norm, memory_bytes=memory_bytes())
        if self._fp16:
            report.report(loss_scale=self._scale, skipped=getattr(context, "skipped_iter", None))
            self._scale = float(self._optimizer.get_loss_scale())

    # ------------------------------------------------------------------------------------------ between steps

    def begin_evaluation(self) -> None:
        self._evaluation = self._loop.operation(EVALUATION)
        self._evaluation.__enter__()

    def end_evaluation(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation:
            evaluation.__exit__(None, None, None)

    def _update_num_microbatches(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._micro_batches.apply()
        return original(*args, **kwargs)

    def leave(self) -> None:
        """Leave the run together with all other ranks; this call is a collective."""
        self._patches.undo()
        self._experts.remove()
        self._rates.remove()
        self._ranks.leave(self._loop)
