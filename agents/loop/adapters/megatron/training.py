"""Reports the steps of Megatron-LM's training loop, and applies knobs and actions between two steps."""

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
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

USED = ("train", "train_step", "update_num_microbatches", "checkpoint_and_decide_exit", "get_args", "mpu")
PHASED = "forward_backward_func"  # argument of train_step
SKIPPED, GRAD_NORM = 1, 5  # positions in the result of train_step


def watch(pretrain: Callable[..., Any], **join: Any) -> None:
    """Connect the training loop of Megatron-LM to a hub. Call `watch` on all ranks, before `pretrain`.

    `pretrain`: the function of `megatron.training`. `join`: further arguments for `agents.join`, such as `run` (the
    default is the name of the ``--save`` folder, or else of the working directory). Steps are numbered like Megatron's
    iterations: the first is step 1. Raises ValueError if `pretrain` is not that function, or if the adapter
    does not support this version of Megatron-LM.
    """
    module = sys.modules.get(getattr(pretrain, "__module__", ""))
    missing = [name for name in USED if not hasattr(module, name)]
    if module is None or missing or PHASED not in inspect.signature(module.train_step).parameters:
        raise ValueError(
            "watch() needs the function pretrain of megatron.training, of Megatron-LM core_v0.14 or newer"
        )

    def train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        objects = inspect.signature(original).bind(*args, **kwargs).arguments
        watched = _Watched(module, objects, join)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            # All ranks exit together, for example after --exit-interval. After an error on this rank, the other ranks
            # may not come to a barrier.
            watched.leave(together=isinstance(error, SystemExit))
            raise
        watched.leave(together=True)
        return result

    Patches().wrap(module, "train", train)


class _Watched:
    """One call of Megatron-LM's `train`, connected to a hub. `objects`: the arguments of this call, by name."""

    def __init__(self, module: ModuleType, objects: Mapping[str, Any], join: dict[str, Any]) -> None:
        self._module, self._args, self._optimizer = module, module.get_args(), objects["optimizer"]
        model, config = objects["model"], objects["config"]
        self._ranks = TorchRanks()
        self._counts_tokens = counts_tokens(module.mpu)
        self._loop = self._join(join, device_of(model))
        self._saving = False
        self._step = int(self._args.iteration)  # number of the last step
        self._patches = Patches()
        self._step_arguments = inspect.signature(module.train_step)
        self._micro_batches = MicroBatches(self._args, config, len(model))
        self._captured = captured(self._args)
        self._experts = RoutingMaps(model, config, module.mpu, self._ranks, self._patches, self._captured)
        self._patches.wrap(module, "train_step", self._train_step)
        self._patches.wrap(module, "update_num_microbatches", self._update_num_microbatches)
        self._patches.wrap(module, "checkpoint_and_decide_exit", self._decide_exit)
        self._patches.operation(self._loop, module, "save_checkpoint_and_time", CHECKPOINT)
        self._patches.operation(self._loop, module, "evaluate_and_print_results", EVALUATION)
        self._rates = LearningRate(self._optimizer)
        self._scale = float(self._optimizer.get_loss_scale()) if getattr(self._args, "fp16", False) else None
        self._declare(model, config)

    def _join(self, join: dict[str, Any], device: int | None) -> Loop:
        args, ranks = self._args, self._ranks
        known: dict[str, Any] = {
            "run": Path(args.save or Path.cwd()).resolve().name[:64] or "megatron",
            "axes": axes_of(self._module.mpu),
            "device": device,
            "facts": {"steps": int(args.train_iters)},
        }
        return agents.join(
            rank=ranks.rank, world=ranks.world, agree=ranks.agree, first_step=1, **(known | join)
        )

    def _declare(self, model: list[Any], config: Any) -> None:
        loop = self._loop
        if self._captured:
            self._log(f"no knobs of the forward pass and no expert load: {self._captured}")
        if why := self._micro_batches.refusal or self._captured:
            self._log(f"no knob num_microbatches: {why}")
        else:
            self._micro_batches.declare(loop, self._set_micro_batches)
        self._rates.declare(loop)
        if not self._captured:
            declare_forward_knobs(loop, self._args, model, config, self._log)
        if self._args.save:
            loop.action("save", self._save, about="save a checkpoint after this step")
        else:
            self._log("no action save: --save is not set")
        loop.action("stop", self._stop, about="end training after this step", ends=True)

    def _set_micro_batches(self, value: int) -> None:
        ends = self._micro_batches.request(value, self._step)
        if ends is not None:
            self._log(f"training now ends after step {ends}, where its data end")

    def _save(self) -> None:
        self._saving = True

    def _stop(self) -> None:
        self._args.train_iters = self._step

    def _log(self, text: str, **facts: Any) -> None:
        if self._ranks.rank == LEADER:
            self._loop.event(text, facts=facts)

    # ------------------------------------------------------------------------------------------ a step

    def _train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._step = int(self._args.curr_iteration) + 1
        with self._loop.step(self._step) as report:
            self._loop.quietly(lambda: report.report(lr=self._learning_rate()))
            result = self._timed(report, original, *args, **kwargs)
            # The collective part comes first, so that an error in the rest cannot make the ranks wait for each other.
            self._loop.quietly(lambda: self._experts.report(report))
            self._loop.quietly(lambda: self._report(report, result))
        return result

    def _timed(self, report: StepReport, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `train_step`, and measure two phases: its `forward_backward_func`, and the rest of the step."""
        call = self._step_arguments.bind(*args, **kwargs)
        forward_backward = call.arguments[PHASED]
        with ExitStack() as after:

            def measured(*args: Any, **kwargs: Any) -> Any:
                after.close()  # Megatron may run the same forward and backward again, to find faults of a GPU
                with report.phase("data, forward, backward"):
                    result = forward_backward(*args, **kwargs)
                after.enter_context(report.phase("optimizer"))
                return result

            call.arguments[PHASED] = measured
            return original(*call.args, **call.kwargs)

    def _report(self, report: StepReport, result: tuple[Any, ...]) -> None:
        losses, grad_norm = result[0], result[GRAD_NORM]
        if losses:  # on the last pipeline stage: means over the batch of all ranks
            report.report(loss=losses.get("lm loss", next(iter(losses.values()))), loss_weight=1)
        if self._counts_tokens:
            args = self._args
            samples = self._micro_batches.value * args.micro_batch_size
            report.report(tokens=samples * args.seq_length // args.context_parallel_size)
        report.report(grad_norm=grad_norm, memory_bytes=memory_bytes())
        if getattr(self._args, "fp16", False):
            report.report(loss_scale=self._scale, skipped=result[SKIPPED])
            self._scale = float(self._optimizer.get_loss_scale())

    def _learning_rate(self) -> float | None:
        groups = self._optimizer.param_groups
        canonical = getattr(self._module, "get_canonical_lr_for_logging", None)
        own = canonical(groups) if canonical else groups[0]["lr"] if groups else None
        return None if own is None else own * self._rates.scale

    # ------------------------------------------------------------------------------------------ between steps

    def _update_num_microbatches(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._micro_batches.apply()
        return original(*args, **kwargs)

    def _decide_exit(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `checkpoint_and_decide_exit`, which saves a checkpoint if the step is a multiple of `save_interval`. To
        carry out a requested save, set `save_interval` to the current step for the duration of this call.
        """
        if not self._saving:
            return original(*args, **kwargs)
        interval, self._args.save_interval = self._args.save_interval, self._step
        self._saving = False
        try:
            exits = original(*args, **kwargs)
        finally:
            self._args.save_interval = interval
        self._log(f"saves a checkpoint of step {self._step}", **{CHECKPOINT_STEP: self._step})
        return exits

    def leave(self, together: bool) -> None:
        """Leave the run. `together`: whether all ranks leave the run; this call is then a collective."""
        self._patches.undo()
        self._experts.remove()
        self._rates.remove()
        if together:
            self._ranks.leave(self._loop)
        else:
            self._loop.close()
