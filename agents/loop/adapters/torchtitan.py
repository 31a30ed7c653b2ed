"""The adapter for torchtitan's `Trainer`.

    from agents.loop.adapters.torchtitan import watch
    watch(trainer)  # after config.build(), before trainer.train()

`Trainer.train_step` reads `gradient_accumulation_steps` at its start, so the value may change between any two steps.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from agents.loop.adapters.expert_load import LARGE, SPARSE, layer_numbers
from agents.loop.adapters.knobs.learning_rate import LearningRate
from agents.loop.adapters.patches import Patches
from agents.loop.adapters.torch_ranks import TorchRanks, coordinates_of, device_number, memory_bytes, own_part
from agents.loop.loop import CHECKPOINT, EVALUATION, Loop
from agents.loop.step import StepReport, discard
from agents.protocol import CHECKPOINT_STEP

MOST = 1024  # highest legal accumulation
COUNTERS = ("tokens_per_expert_E", "tokens_per_expert")  # of a MoE layer, in torchtitan 0.3 and 0.2
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # of `ParallelDims`, outermost first


def watch(trainer: Any, **join: Any) -> Loop:
    """Connect a torchtitan `Trainer` to a hub. Call `watch` on all ranks, after ``config.build()`` and before
    ``trainer.train()``.

    `join`: further arguments for `agents.join`, such as `run` (the default is the name of ``dump_folder``). Steps are
    numbered like `trainer.step`: the first is step 1.
    """
    ranks = TorchRanks()
    run = Path(trainer.config.dump_folder or "").resolve().name[:64] or "torchtitan"
    known: dict[str, Any] = {"run": run, "device": device_number(trainer.device)}
    known["facts"] = {"steps": int(trainer.config.training.steps)}
    loop = ranks.join(_axes(trainer.parallel_dims, ranks), known, join)
    _Watched(trainer, ranks, loop)
    return loop


class _Watched:
    """One trainer, connected to a hub: wraps the methods of its training loop."""

    def __init__(self, trainer: Any, ranks: TorchRanks, loop: Loop) -> None:
        self._trainer, self._ranks, self._loop = trainer, ranks, loop
        self._learning_rate = LearningRate(trainer.optimizers)
        self._experts = _ExpertCounters(trainer.model_parts, ranks)
        # Each batch has whole sequences, which the ranks of cp then divide.
        self._context_ranks = trainer.parallel_dims.cp, _axes(trainer.parallel_dims, ranks).get("cp", 0)
        self._report: StepReport | None = None
        self._losses: list[Any] = []  # this rank's part of the loss of each micro-batch, as tensors
        self._tokens = 0
        self._saving = self._stopping = self._left = False
        self._patches = Patches()
        self._patch()
        self._declare()

    def _patch(self) -> None:
        trainer, patches = self._trainer, self._patches
        patches.wrap(trainer, "train_step", self._train_step)
        patches.wrap(trainer, "forward_backward_step", self._forward_backward_step)
        patches.wrap(trainer, "should_continue_training", self._should_continue)
        patches.wrap(trainer, "close", self._close)
        patches.wrap(trainer.optimizers, "step", self._optimizer_step)
        patches.wrap(trainer.metrics_processor, "log", self._log)
        patches.operation(self._loop, trainer.checkpointer, "save", CHECKPOINT)
        patches.operation(self._loop, getattr(trainer, "validator", None), "validate", EVALUATION)

    def _declare(self) -> None:
        loop, trainer = self._loop, self._trainer
        loop.knob(
            "gradient_accumulation_steps",
            int,
            (1, max(MOST, trainer.gradient_accumulation_steps)),
            value=trainer.gradient_accumulation_steps,
            apply=self._set_accumulation,
            loss_neutral=False,
            about="micro-batches per update",
        )
        self._learning_rate.declare(loop)
        checkpointer = trainer.checkpointer
        if getattr(checkpointer, "enable", False) and hasattr(checkpointer, "_should_save"):
            self._patches.wrap(checkpointer, "_should_save", self._should_save)
            loop.action("save", self._save, about="save a checkpoint after this step")
        else:
            loop.event("no action save: checkpoints are off (checkpoint.enable)")
        loop.action("stop", self._stop, about="end training after this step", ends=True)

    def _set_accumulation(self, value: int) -> None:
        self._trainer.gradient_accumulation_steps = value

    def _save(self) -> None:
        self._saving = True

    def _stop(self) -> None:
        self._stopping = True

    # ------------------------------------------------------------------------------------------ a step

    def _train_step(self, original: Any, data_iterator: Any) -> Any:
        context: AbstractContextManager[StepReport] = self._loop.step(self._trainer.step)
        self._report = context.__enter__()
        self._losses, self._tokens = [], 0
        try:
            result = original(self._timed(data_iterator))
        except BaseException:  # for example, the data are exhausted, and torchtitan cancels the step
            self._report = None
            discard(context)
            raise
        # The collective part comes first, so that an error in the rest cannot make the ranks wait for each other.
        self._loop.quietly(self._report_experts)
        self._loop.quietly(self._report_step)
        self._report = None
        context.__exit__(None, None, None)
        return result

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while self._report:
            with self._report.phase("data"):
                # torchtitan's iterator raises its own error when the data are exhausted.
                batch = next(batches, None)
            if batch is None:
                return
            self._tokens += own_part(batch[1].numel(), *self._context_ranks)
            yield batch

    def _forward_backward_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._report is None:
            return original(*args, **kwargs)
        with self._report.phase("forward, backward"):
            loss = original(*args, **kwargs)
        self._losses.append(loss.detach().clone())  # a CUDA graph overwrites its output
        return loss

    def _optimizer_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._report is None:
            return original(*args, **kwargs)
        self._report.report(lr=self._learning_rate.current())
        self._loop.quietly(self._experts.read)
        try:
            with self._report.phase("optimizer"):
                return original(*args, **kwargs)
        finally:
            self._loop.quietly(self._experts.note_start)

    def _log(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        # step, mean loss, largest loss, gradient norm
        if self._report and len(args) > 3:
            self._report.report(grad_norm=args[3])
        return original(*args, **kwargs)

    def _report_experts(self) -> None:
        assert self._report
        self._report.report_experts(self._experts.total(self._report.number))

    def _report_step(self) -> None:
        assert self._report
        dims = self._trainer.parallel_dims
        mesh = dims.get_optional_mesh("loss")
        shares = mesh.size() if mesh is not None else 1
        # Each loss is the sum over this rank's tokens, divided by the tokens of all ranks of this mesh.
        known = self._losses and (not dims.pp_enabled or self._trainer.pp_has_last_stage)
        loss = float(sum(self._losses)) * shares if known else None
        self._report.report(
            loss=loss, loss_weight=1, tokens=self._tokens or None, memory_bytes=memory_bytes()
        )

    # ------------------------------------------------------------------------------------------ save and stop

    def _should_save(self, original: Any, curr_step: int, *args: Any, **kwargs: Any) -> bool:
        saves = original(curr_step, *args, **kwargs)
        if self._saving:
            self._saving = False
            if self._ranks.rank == 0:
                text = f"saves a checkpoint of step {curr_step}"
                self._loop.event(text, facts={CHECKPOINT_STEP: int(curr_step)})
            return True
        return bool(saves)

    def _should_continue(self, original: Any) -> bool:
        return not self._stopping and bool(original())

    def _close(self, original: Any) -> Any:
        if not self._left:
            self._left = True
            self._patches.undo()
            self._learning_rate.remove()
            if sys.exc_info()[0] is None:
                self._ranks.leave(self._loop)
            else:  # after an error on this rank, the other ranks may not come to a barrier
                self._loop.close()
        return original()


class _ExpertCounters:
    """The counters of the MoE layers: on each rank, the token-expert pairs of its own tokens since the last reset.

    `optimizers.step` resets the counter of each layer that balances its load with a bias. The counters of layers
    without such a bias are never reset. If a layer uses activation checkpointing, its counter counts each token-expert
    pair twice.
    """

    def __init__(self, model_parts: Sequence[Any], ranks: TorchRanks) -> None:
        found = [one for part in model_parts for one in _counters(part)]
        self._ranks = ranks
        self._layers = layer_numbers([name for name, _, _, _ in found])
        self._found = found
        self._starts: list[Any] = []
        self._own: Any = None  # pairs of all experts of all layers in this step
        self._sizes: list[int] = []
        self.note_start()

    def note_start(self) -> None:
        """Remember the counters at the start of a step."""
        self._starts = [self._counter(*one[1:3]).clone() for one in self._found]

    def read(self) -> None:
        """Read the counters at the end of a step. Call this before `optimizers.step`, which may reset the counters."""
        import torch

        own = [
            (self._counter(layer, name) - start) / (2 if twice else 1)
            for (_, layer, name, twice), start in zip(self._found, self._starts, strict=True)
        ]
        self._sizes = [one.numel() for one in own]
        self._own = torch.cat(own).round().to(torch.int64) if own else None

    def total(self, step: int) -> Mapping[int, Sequence[int]]:
        """Each layer's expert load, summed over all ranks; {} if the model has no MoE layers. For a large model,
        returns {} except at every `SPARSE`-th step. This call is a collective.
        """
        import torch

        if self._own is None or (sum(self._sizes) > LARGE and step % SPARSE):
            return {}
        loads = torch.split(self._ranks.sum(self._own), self._sizes)
        return {layer: load.tolist() for layer, load in zip(self._layers, loads, strict=True)}

    def _counter(self, layer: Any, name: str) -> Any:
        counter = getattr(layer, name).detach()
        return counter.to_local() if hasattr(counter, "to_local") else counter


def _counters(model: Any) -> Iterator[tuple[str, Any, str, bool]]:
    """For each MoE layer: its name, the module, the name of its counter, and whether recompute counts every
    token-expert pair twice."""
    recomputed = [
        name for name, module in model.named_modules() if getattr(module, "checkpoint_impl", None) is not None
    ]
    for name, module in model.named_modules():
        counter = next((one for one in COUNTERS if one in getattr(module, "_buffers", {})), None)
        if counter:
            twice = any(not outer or name == outer or name.startswith(f"{outer}.") for outer in recomputed)
            yield name, module, counter, twice


def _axes(dims: Any, ranks: TorchRanks) -> dict[str, int]:
    """The coordinates of this rank on the axes with more than one rank."""
    return coordinates_of(ranks.rank, {axis: getattr(dims, axis) for axis in AXES})
