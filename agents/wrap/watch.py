"""Implements the hooks of a wrapped process. The hooks measure the steps of the main optimizer, and report these steps
once the process has joined a run.

A process joins when an optimizer steps for the second time. Launchers, data loader workers and other processes that do
not train therefore never join. A separate thread joins the run, so the program does not wait for the hub.
"""

import atexit
import multiprocessing.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agents.loop.adapters.knobs.learning_rate import LearningRateScale
from agents.wrap.hooks import Hooks, say
from agents.wrap.optimizers import MainOptimizer
from agents.wrap.sensors.losses import Losses
from agents.wrap.sensors.modules import Forwards
from agents.wrap.sensors.phases import COMMUNICATION, Phases

if TYPE_CHECKING:
    from agents.wrap.joining import Joining
    from agents.wrap.loop import WrappedLoop


OPEN_FILES = "/proc/self/fd"


class Watch:
    """Measures the training steps of one process under `cockpit wrap`. Phases and steps are measured in the thread that
    calls `optimizer.step`."""

    def __init__(self, hooks: Hooks) -> None:
        from agents.wrap.sensors.traffic import Replicas, StepTraffic

        self._hooks = hooks
        self._optimizers, self._rates = MainOptimizer(), LearningRateScale()
        self._phases, self._losses = Phases(), Losses()
        self._traffic, self._replicas = StepTraffic(), Replicas()
        self._forwards = Forwards(hooks, self._phases, self._replicas, self._traffic)
        self._stepping: list[Any] = []  # optimizers in the middle of a step, the outermost first
        self._inside = False  # whether a collective is running, because it may call another one
        self._tokens: int | None = None
        self._steps = 0
        self._began: float | None = None  # when the step in progress began
        self._joining: Joining | None = None
        self._loop: WrappedLoop | None = None

    def listen(self) -> None:
        """Install the hooks."""
        import torch
        from torch.utils.data import dataloader

        hooks = self._hooks
        hooks.at_end(self._rates.close)
        hooks.at_end(self.close)
        hooks.optimizers(self._before_optimizer, self._after_optimizer)
        hooks.wrap(torch.autograd, "backward", self._backward)  # `Tensor.backward` calls it too
        hooks.wrap(dataloader._BaseDataLoaderIter, "__next__", self._next_batch)
        hooks.wrap(torch.amp.GradScaler, "scale", self._scale)
        hooks.wrap(torch, "save", self._save, also=(torch.serialization,))
        if torch.distributed.is_available():
            self._listen_to_collectives()
        if os.path.isdir(OPEN_FILES):
            hooks.wrap(os, "close", self._close_file)
            hooks.wrap(os, "closerange", self._close_files)

    def _listen_to_collectives(self) -> None:
        import torch.distributed as dist

        from agents.wrap.sensors.traffic import COLLECTIVES, RENAMED

        for name, collective in COLLECTIVES.items():
            if hasattr(dist, RENAMED.get(name, "")):
                continue

            def around(original: Any, *args: Any, _collective: Any = collective, **kwargs: Any) -> Any:
                return self._collective(_collective, original, args, kwargs)

            self._hooks.wrap(dist, name, around, also=(dist.distributed_c10d,))
        self._hooks.wrap(dist.Work, "wait", self._wait)
        self._hooks.wrap(dist, "destroy_process_group", self._leave_group, also=(dist.distributed_c10d,))

    # ------------------------------------------------------------------------------------------ phases

    def _next_batch(self, original: Any, iterator: Any) -> Any:
        self._phases.enter("data")
        try:
            batch = original(iterator)
        finally:
            self._phases.leave("data")
        self._hooks.guarded(self._count_tokens, batch)
        return batch

    def _count_tokens(self, batch: Any) -> None:
        tokens: Any = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if hasattr(tokens, "numel"):
            self._tokens = (self._tokens or 0) + int(tokens.numel())

    def _save(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._phases.enter("checkpoint")
        try:
            return original(*args, **kwargs)
        finally:
            self._phases.leave("checkpoint")

    def _scale(self, original: Any, scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, outputs, *args, **kwargs)
        if hasattr(outputs, "numel"):
            self._hooks.guarded(self._losses.scaled, scaled, outputs)
        return scaled

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = args[0] if args else kwargs.get("tensors")
        return self._in_backward(sole(tensors), original, args, kwargs)

    def _backward_chunk(self, original: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
        """The backward pass of one micro-batch in a stage of `torch.distributed.pipelining`. In some schedules, it
        computes only the gradients of the stage's input, without `torch.autograd.backward`."""
        loss = args[1] if len(args) > 1 else kwargs.get("loss")
        return self._in_backward(sole(loss), original, (stage, *args), kwargs)

    def _in_backward(self, tensor: Any, original: Any, args: Any, kwargs: Any) -> Any:
        """Call `original`, a backward pass that begins at `tensor`; None: at several tensors, so there is no loss."""
        if not self._phases.ours or self._phases.within(
            "backward"
        ):  # such as the backward pass of a recomputation
            return original(*args, **kwargs)
        reduction = None
        if tensor is not None:
            self._hooks.guarded(self._losses.backward, tensor, bool(self._stepping))
            reduction = self._hooks.guarded(self._watch_reduction, tensor)
        self._phases.enter("backward")
        try:
            return original(*args, **kwargs)
        finally:
            ended = time.perf_counter()
            self._phases.leave("backward")
            self._hooks.guarded(self._end_backward, reduction, ended)

    def _watch_reduction(self, tensor: Any) -> list[float] | None:
        """If DistributedDataParallel reduces gradients in this backward pass, record the time at which the computation
        of the pass ends. torch runs the callback that is queued here before the callback in which the reducer waits for
        its last reductions."""
        if not self._replicas.reduces or tensor.grad_fn is None:
            return None
        import torch

        computed: list[float] = []
        engine = torch.autograd.Variable._execution_engine

        def begin(_: Any) -> None:
            handle.remove()
            engine.queue_callback(lambda: computed.append(time.perf_counter()))

        handle = tensor.register_hook(begin)
        return computed

    def _end_backward(self, computed: list[float] | None, ended: float) -> None:
        axis = self._replicas.backward(self._traffic)
        if axis and computed:
            waited = ended - computed[0]
            self._traffic.waited(axis, waited)
            self._phases.move(waited, "backward", COMMUNICATION)

    def _collective(self, collective: Any, original: Any, args: Any, kwargs: Any) -> Any:
        if self._inside:
            return original(*args, **kwargs)
        axis = self._hooks.guarded(self._traffic.sent, collective, args, kwargs)
        return self._waiting(axis, original, args, kwargs)

    def _wait(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return self._waiting(None, original, args, kwargs)

    def _waiting(self, axis: str | None, original: Any, args: Any, kwargs: Any) -> Any:
        """Call `original`, a torch function in which the program may wait for other ranks."""
        if self._inside or not self._phases.ours:
            return original(*args, **kwargs)
        self._inside = True
        self._phases.enter(COMMUNICATION)
        began = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            self._inside = False
            self._phases.leave(COMMUNICATION)
            self._traffic.waited(axis, time.perf_counter() - began)

    # ------------------------------------------------------------------------------------------ steps

    def _before_optimizer(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._hooks.guarded(self._begin_update, optimizer, args, kwargs)

    def _begin_update(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._stepping:
            self._phases.begin_thread()
        elif not self._phases.ours:
            return None
        if any(one is optimizer for one in self._stepping):  # its last step raised an exception
            self._stepping.clear()
        self._stepping.append(optimizer)
        if len(self._stepping) == 1:
            self._phases.leave("optimizer")
            self._phases.enter("optimizer")
            return self._rates.before_step(optimizer, args, kwargs)
        return None

    def _after_optimizer(self, optimizer: Any, *_: object) -> None:
        ends = self._hooks.guarded(self._end_update, optimizer)
        if ends and self._hooks.on:
            self._hooks.guarded(self._end_step, optimizer)
            if self._loop and self._loop.stopping:
                self._stop()

    def _end_update(self, optimizer: Any) -> bool:
        """Handle the end of an optimizer's step. Returns whether this also ends a step of the run."""
        if not self._phases.ours or not self._stepping or self._stepping[-1] is not optimizer:
            return False
        self._stepping.pop()
        if self._stepping:
            return False
        self._rates.restore()
        self._phases.leave("optimizer")
        self._losses.end_optimizer()
        before = self._optimizers.main
        ends = self._optimizers.stepped(optimizer)
        if before is None and self._optimizers.main is not None:
            self._join()
        return ends

    def _join(self) -> None:
        """Start joining a run in a separate thread, because the program has begun to train."""
        from agents.wrap.joining import Joining

        self._forwards.follow()
        if stages := sys.modules.get("torch.distributed.pipelining.stage"):
            self._hooks.wrap(stages._PipelineStageBase, "backward_one_chunk", self._backward_chunk)
        if self._joining is None and self._loop is None:
            self._joining = Joining()
            atexit.register(self.close)
            if multiprocessing.parent_process() is not None:  # such a process ends without its exit handlers
                multiprocessing.util.Finalize(None, self.close, exitpriority=10)

    def _end_step(self, optimizer: Any) -> None:
        now = time.perf_counter()
        began, self._began = self._began, now
        self._steps = self._optimizers.count
        phases, loss = self._phases.take(), self._losses.take()
        comm, tokens = self._traffic.take(), self._tokens
        self._tokens = None
        if self._loop is None:
            self._enter_run()
        if self._loop is None or began is None:
            return
        rate = self._rates.rate(optimizer)
        self._loop.measured(self._steps, 1e3 * (now - began), phases, comm, loss, tokens, rate)
        if self._loop.why:
            self._hooks.end(self._loop.why)

    def _enter_run(self) -> None:
        """Start reporting to the run once the joining thread has finished; if it has failed, remove the hooks."""
        if self._joining is None or not self._joining.done:
            return None
        joining, self._joining = self._joining, None
        if joining.failure:
            return self._hooks.end(joining.failure)
        self._loop = joining.loop(self._rates, self._phases, self._hooks)
        return None

    def _stop(self) -> None:
        """End the program as an operator requested: every rank raises SystemExit in its training thread after the same
        step. The exit status is 0, so that a launcher does not restart the program."""
        step = self._steps
        self._hooks.end()
        say(f"stopped after step {step}, as an operator requested")
        raise SystemExit(0)

    # ------------------------------------------------------------------------------------------ end

    def _leave_group(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        group = args[0] if args else kwargs.get("group")
        if group is None or group is dist.group.WORLD:  # all groups, with the store in which the ranks vote
            self._hooks.guarded(self._hooks.end)
        return original(*args, **kwargs)

    def forked(self) -> None:
        """Restart the measurement in a forked process, without the threads and sockets of the parent."""
        on, self._hooks.on = self._hooks.on, False
        atexit.unregister(self.close)
        self._joining = self._loop = None
        self._begin_again()
        self._hooks.on = on

    def _begin_again(self) -> None:
        self._rates.restore()
        self._rates.scale = 1.0
        self._optimizers, self._steps, self._began = MainOptimizer(), 0, None
        self._phases, self._losses, self._inside = Phases(), Losses(), False
        self._stepping = []
        self._forwards.phases = self._phases

    def _close_file(self, original: Any, descriptor: Any) -> Any:
        if (self._loop or self._joining) and isinstance(descriptor, int):
            self._hooks.guarded(self._before_closing, (descriptor,))
        return original(descriptor)

    def _close_files(self, original: Any, low: Any, high: Any) -> Any:
        if (self._loop or self._joining) and isinstance(low, int) and isinstance(high, int):
            self._hooks.guarded(self._before_closing, range(low, high))
        return original(low, high)

    def _before_closing(self, descriptors: Sequence[int]) -> None:
        """Leave the run before the program closes descriptors of the connection to the hub, as a program does that
        closes all descriptors above 2: libzmq aborts the process when it loses a descriptor."""
        if len(descriptors) > 1:
            descriptors = [one for one in map(int, os.listdir(OPEN_FILES)) if one in descriptors]
        if any(map(wakes_threads, descriptors)):
            self._hooks.end("it closes file descriptors that it has not opened")

    def close(self) -> None:
        """Leave the run. A second call does nothing."""
        atexit.unregister(self.close)
        joining, loop = self._joining, self._loop
        self._joining = self._loop = None
        if joining:
            joining.close()
        if loop:
            loop.close()


def sole(tensors: Any) -> Any:
    """The only tensor of `tensors`, which is a tensor or a sequence of tensors; None if there are several."""
    if isinstance(tensors, Sequence):
        tensors = tensors[0] if len(tensors) == 1 else None
    return tensors if hasattr(tensors, "numel") else None


def wakes_threads(descriptor: int) -> bool:
    """Whether a descriptor is one of those through which libzmq wakes its threads (eventfd and epoll of Linux)."""
    try:
        return os.readlink(f"{OPEN_FILES}/{descriptor}").startswith("anon_inode:[event")
    except OSError:
        return False


def install() -> None:
    """Install the hooks in this process, which has just imported torch."""
    hooks = Hooks()
    watch = Watch(hooks)
    hooks.guarded(watch.listen)
    os.register_at_fork(after_in_child=watch.forked)
