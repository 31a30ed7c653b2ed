"""The adapter for the `Trainer` of Hugging Face's transformers, and for TRL's trainers, which are built on it.

    from agents.loop.adapters.huggingface import CockpitCallback
    trainer.add_callback(CockpitCallback(trainer))

`Trainer` ends an update when the number of completed micro-batches in the epoch is a multiple of
`gradient_accumulation_steps`. If this setting changes while the number of completed micro-batches is not a multiple of
the new value, the next update has too few micro-batches, a wrong loss and, under DDP, gradients that were not reduced.
So a change of this setting waits until the number of completed micro-batches is a multiple of the new value
(`accumulation.py`).
"""

import functools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from agents.loop.adapters.accelerate import LossScale, axes_of, context_ranks
from agents.loop.adapters.expert_load import ExpertLoad
from agents.loop.adapters.knobs.accumulation import MicroBatches
from agents.loop.adapters.knobs.learning_rate import LearningRate
from agents.loop.adapters.patches import Patches
from agents.loop.adapters.torch_ranks import TorchRanks, device_number, memory_bytes, own_part, token_count
from agents.loop.loop import CHECKPOINT, EVALUATION, Loop
from agents.loop.step import StepReport, discard
from agents.protocol import CHECKPOINT_STEP

UNKNOWN = 1024  # highest legal accumulation if the number of micro-batches in an epoch is unknown


class CockpitCallback:
    """Connects the trainer's next `train()` to a hub. Steps are numbered as in the trainer's own log: the first update
    is step 1.

    `trainer`: the trainer to which this callback is added. `join`: further arguments for `agents.join`, such as `run`
    (the default is the trainer's `run_name`, or the name of its `output_dir`) or `hub`. All ranks pass the same
    arguments.
    """

    def __init__(self, trainer: Any, **join: Any) -> None:
        self._trainer, self._join = trainer, join
        self._training: _Training | None = None

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: Any,
        optimizer: Any,
        train_dataloader: Any,
        **_: object,
    ) -> None:
        # With `auto_find_batch_size`, training may begin again without a call of `on_train_end`.
        self.on_train_end(args, state, control)
        ranks = TorchRanks()
        run = args.run_name or Path(args.output_dir or "").name or "trainer"
        known: dict[str, Any] = {"run": Path(run).name[:64], "device": device_number(args.device)}
        known["facts"] = {"steps": int(state.max_steps)}
        loop = ranks.join(axes_of(self._trainer.accelerator, ranks), known, self._join)
        micro_batches = MicroBatches(train_dataloader, state, args)
        learning_rate, experts = LearningRate(optimizer), ExpertLoad(model, ranks)
        self._training = _Training(self._trainer, ranks, loop, micro_batches, learning_rate, experts)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if self._training:
            self._training.begin_update()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if self._training:
            self._training.end_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> Any:
        if self._training:
            self._training.end_step(control)
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if self._training and state.is_world_process_zero:
            text = f"saved checkpoint-{state.global_step} in {args.output_dir}"
            self._training.loop.event(text, facts={CHECKPOINT_STEP: int(state.global_step)})

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if self._training:
            self._training.micro_batches.begin_epoch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if self._training:
            self._training.discard_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if self._training:
            self._training.close()
        self._training = None

    def __getattr__(self, name: str) -> Any:
        # transformers calls a method for each of its events. This class inherits none of them, because it does not
        # import TrainerCallback.
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)


def _nothing(*_: object, **__: object) -> None:
    return None


class _Training:
    """One call of `Trainer.train`, connected to a hub from `on_train_begin` on."""

    def __init__(
        self,
        trainer: Any,
        ranks: TorchRanks,
        loop: Loop,
        micro_batches: MicroBatches,
        learning_rate: LearningRate,
        experts: ExpertLoad,
    ) -> None:
        self.loop, self.micro_batches, self._ranks = loop, micro_batches, ranks
        self._trainer, self._args = trainer, trainer.args
        self._loss_scale = LossScale(trainer.accelerator)
        self._context_ranks = context_ranks(trainer.accelerator, ranks)
        self._learning_rate, self._experts = learning_rate, experts
        self._context: AbstractContextManager[StepReport] | None = None
        self._report: StepReport | None = None
        self._optimizer_phase: AbstractContextManager[None] | None = None
        self._losses: list[Any] = []  # losses of the micro-batches of this step, as tensors
        self._tokens = 0
        self._switched = self._saving = self._stopping = False
        self._patches = Patches()
        self._patch()
        self._declare()

    def _patch(self) -> None:
        trainer, patches = self._trainer, self._patches
        patches.wrap(trainer, "get_batch_samples", self._get_batch_samples)
        patches.wrap(trainer, "training_step", self._training_step)
        patches.wrap(trainer, "compute_loss", functools.partial(self._timed, "forward"))
        patches.wrap(trainer.accelerator, "backward", functools.partial(self._timed, "backward"))
        patches.wrap(trainer.accelerator, "clip_grad_norm_", self._clip_grad_norm)
        for name in ("evaluate", "predict"):
            patches.operation(self.loop, trainer, name, EVALUATION)
        for name in ("_save_checkpoint", "save_model"):
            patches.operation(self.loop, trainer, name, CHECKPOINT)

    def _declare(self) -> None:
        loop, args = self.loop, self._args
        if getattr(self._trainer, "is_deepspeed_enabled", False):
            loop.event("no knob gradient_accumulation_steps: DeepSpeed counts micro-batches itself")
        else:
            loop.knob(
                "gradient_accumulation_steps",
                int,
                (1, max(self.micro_batches.length or UNKNOWN, args.gradient_accumulation_steps)),
                value=args.gradient_accumulation_steps,
                apply=self._set_accumulation,
                loss_neutral=False,
                about="micro-batches per update; a new value waits until the epoch's count is a multiple of it",
                waits=self.micro_batches.wait,
            )
        self._learning_rate.declare(loop)
        loop.action("save", self._save, about="save a checkpoint after this step")
        loop.action("stop", self._stop, about="end training after this step", ends=True)

    def _save(self) -> None:
        self._saving = True

    def _stop(self) -> None:
        self._stopping = True

    def _set_accumulation(self, value: int) -> None:
        self._args.gradient_accumulation_steps = value
        self._switched = True

    def _get_batch_samples(self, original: Any, epoch_iterator: Any, num_batches: int, *rest: Any) -> Any:
        # Each epoch, the trainer computes the size of the last update from the accumulation at the epoch's start.
        if self._switched:
            num_batches = self._args.gradient_accumulation_steps
        if self._report is None:
            self._context = self.loop.step(self._trainer.state.global_step + 1)
            self._report = self._context.__enter__()
        with self._report.phase("data"):
            return original(epoch_iterator, num_batches, *rest)

    def _training_step(self, original: Any, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        self._tokens += own_part(self._count_tokens(inputs), *self._context_ranks)
        self.micro_batches.count()
        loss = original(model, inputs, *rest, **named)
        self._losses.append(loss)
        return loss

    def _count_tokens(self, inputs: Any) -> int:
        """The tokens of a micro-batch; without padding, if the trainer counts so (`include_num_input_tokens_seen`)."""
        if getattr(self._args, "include_num_input_tokens_seen", None) == "non_padding":
            pad = getattr(getattr(self._trainer, "processing_class", None), "pad_token_id", None)
            if "attention_mask" in inputs:
                return int(inputs["attention_mask"].sum())
            if pad is not None and "input_ids" in inputs:
                return int((inputs["input_ids"] != pad).sum())
        return token_count(inputs) or 0

    def _timed(self, phase: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._report is None:  # no step is open during an evaluation
            return original(*args, **kwargs)
        with self._report.phase(phase):
            return original(*args, **kwargs)

    def _clip_grad_norm(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        if self._report:
            self._report.report(grad_norm=norm)
        return norm

    def begin_update(self) -> None:
        if self._report:
            self._optimizer_phase = self._report.phase("optimizer")
            self._optimizer_phase.__enter__()

    def end_update(self) -> None:
        if self._report:
            self._report.report(lr=self._learning_rate.current())
            self._loss_scale.report(self._report)
        if self._optimizer_phase:
            self._optimizer_phase.__exit__(None, None, None)
            self._optimizer_phase = None

    def end_step(self, control: Any) -> None:
        """Report the update that has just ended, vote with the other ranks on pending operator commands (such as a knob
        change or a save), and set the trainer's flags for saving and stopping if that was decided."""
        if not self._context or not self._report:
            return
        self.micro_batches.end_update()
        # The collective part comes first, so that an error in the rest cannot make the ranks wait for each other.
        self.loop.quietly(self._report_experts)
        self.loop.quietly(self._report_step)
        context, self._context, self._report = self._context, None, None
        self._losses, self._tokens = [], 0
        context.__exit__(None, None, None)
        control.should_save |= self._saving
        control.should_training_stop |= self._stopping
        self._saving = False

    def _report_step(self) -> None:
        assert self._report
        # The trainer's loss of an update is the sum over its micro-batches, and the job's loss is the mean over ranks.
        loss = float(sum(self._losses)) if self._losses else None
        self._report.report(
            loss=loss, loss_weight=1, tokens=self._tokens or None, memory_bytes=memory_bytes()
        )

    def _report_experts(self) -> None:
        assert self._report
        self._experts.report(self._report)

    def discard_step(self) -> None:
        """Discard the report of a step that the trainer began at the end of an epoch, although no data were left."""
        context, self._context, self._report = self._context, None, None
        discard(context)

    def close(self) -> None:
        self.discard_step()
        self._patches.undo()
        self._experts.remove()
        self._learning_rate.remove()
        self._ranks.leave(self.loop)
