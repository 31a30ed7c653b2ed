"""The knob `num_microbatches` of the training loops of Megatron-LM and Megatron-Bridge.

At the start of each step, `train` calls `update_num_microbatches` and then reads the number of micro-batches. If this
number has increased, `train` saves a checkpoint (with `--save`); if it has decreased, `train` ends the program. So the
adapter changes the number inside `update_num_microbatches`, by replacing Megatron's micro-batch calculator. The knob
refuses a number below the current one, because an assertion in `train` would then fail and end the training process.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from agents.loop.loop import Loop

MOST = 1024  # highest legal number


class MicroBatches:
    """The number of micro-batches per step and data-parallel rank.

    `args`: Megatron-LM's options. `refusal`: why the number cannot change; "" if it can. `chunks`: number of model
    chunks on this rank; above 1, the pipeline stages are interleaved.
    """

    def __init__(self, args: Any, config: Any, chunks: int) -> None:
        self._args = args
        self._calculator = import_module("megatron.core.num_microbatches_calculator")
        self._group = getattr(config, "microbatch_group_size_per_vp_stage", None) or 1 if chunks > 1 else 1
        self._requested: int | None = None
        self.refusal = _refusal(args)

    @property
    def value(self) -> int:
        """The current number of micro-batches."""
        return int(self._calculator.get_num_microbatches())

    def declare(self, loop: Loop, apply: Callable[[int], None]) -> None:
        loop.knob(
            "num_microbatches",
            int,
            self._legal,
            value=self.value,
            apply=apply,
            loss_neutral=False,
            about="micro-batches per step and data-parallel rank; Megatron does not allow it to fall",
            waits=self._check,
        )

    def _legal(self) -> tuple[float, float]:
        now = self._requested or self.value
        return now, max(MOST, now)

    def _check(self, value: int) -> str:
        if value % self._group:
            raise ValueError(
                f"num_microbatches = {value} is not legal: with interleaved pipeline stages it is a multiple of "
                f"{self._group}"
            )
        return ""

    def request(self, value: int, step: int) -> int | None:
        """Make `value` take effect in the step after `step`. A data loader that does not repeat its data runs out of
        data earlier if each step uses more micro-batches; with such a loader, set and return the new last step.
        """
        args, before = self._args, self._requested or self.value
        self._requested = value
        if args.dataloader_type != "single":  # other loaders repeat their data
            return None
        args.train_iters = step + (args.train_iters - step) * before // value
        return int(args.train_iters)

    def apply(self) -> None:
        """Switch to the requested number of micro-batches, if there is a request."""
        value, self._requested = self._requested, None
        if value is None:
            return
        calculator, size = self._calculator, self._args.micro_batch_size
        samples = (
            calculator.get_current_running_global_batch_size() // self.value
        )  # of a micro-batch, all ranks
        calculator.reconfigure_num_microbatches_calculator(
            rank=self._args.rank,
            rampup_batch_size=None,
            global_batch_size=value * samples,
            micro_batch_size=size,
            data_parallel_size=samples // size,
        )


def _refusal(args: Any) -> str:
    options = ("rampup_batch_size", "step_batch_size_schedule", "perform_rl_step")
    used = next((name for name in options if getattr(args, name, None)), None)
    return f"--{used.replace('_', '-')} sets the number of micro-batches" if used else ""
