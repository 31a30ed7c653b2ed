"""Summarises a step of the whole job from the measurements of all ranks.

One vector is reduced over all ranks to rank 0 on the control group, in another thread; rank 0 reads the result one step
later. The summary is therefore one step late, and no step waits for it. The vector has the same length for any number
of ranks: with 2,048 ranks and the experts of DeepSeek-V3, rank 0 receives 11 vectors of 126 kB in a step. Summaries are
computed even if there is no hub.
"""

import math
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.protocol import Changes, Experts, Loads, Summary, Traffic
from engine.config.layout import Layout
from engine.device import matmul_peak
from engine.metering.axes import AXES
from engine.metering.meter import Readings
from engine.model.interface import model_flops
from engine.parallel.collectives import AsyncCollective
from engine.parallel.mesh import World
from engine.planner.idle_time import Idle
from engine.telemetry.expert_load import experts_message, loads_message


@dataclass(frozen=True)
class StepConditions:
    """Values that are equal on all ranks in a step, such as the step number, the knob values and the learning rate."""

    step: int
    revision: int
    knobs: Changes
    lr: float
    time_s: float
    _: KW_ONLY
    validation_loss: float | None = None  # the loss after this step, if it was measured
    loss_scale: float | None = None  # with fp16
    skipped_steps: int = 0  # number of skipped steps before this step


@dataclass(frozen=True)
class Measured:
    """A rank's measurements of one step that are not among the `Readings` of its meter (bytes, times and expert loads).
    The job's loss is the sum of all ranks' `loss`."""

    loss: float
    grad_norm: float
    step_s: float
    idle: Idle | None  # None without a pipeline


RANKS_NAMED = 64  # maximum number of ranks in a summary whose loss is not finite
MARKED = (
    48  # ranks for which one element of the reduced vector has a bit; a double holds sums of 53 bits exactly
)

_HEAD = (
    "step_s",  # the slowest rank's; all other elements are sums over the ranks
    "loss",
    *Idle.SHARES,
    "idle_ranks",  # number of ranks that know their idle time
    "a2a_bytes",
    "replica_bytes",
    "replica_bytes_plain",
)


def _marks(world: int, rank: int | None) -> list[float]:
    """A bit for each rank of the job, set for `rank`. Each rank sets only its own bit, so a sum of marks is their
    union."""
    marks = [0.0] * -(-world // MARKED)
    if rank is not None:
        marks[rank // MARKED] = 2.0 ** (rank % MARKED)
    return marks


def _ranks_in(marks: NDArray[np.float64]) -> list[int]:
    return [
        MARKED * place + bit
        for place, sum_ in enumerate(marks)
        for bit in range(MARKED)
        if int(sum_) >> bit & 1
    ]


def _combine(mine: Tensor, other: Tensor) -> None:
    """Combine another rank's vector with `mine`, in place."""
    mine[0] = torch.maximum(mine[0], other[0])
    mine[1:] += other[1:]


class StepSummaries:
    """Reduces the measurements of all ranks to rank 0, and summarises them there."""

    def __init__(self, layout: Layout, world: World, oversubscribed: bool):
        self._layout, self._world, self._oversubscribed = layout, world, oversubscribed
        self._peak = matmul_peak(world.device, layout.train.precision)
        self._pending: tuple[AsyncCollective, Tensor, float, StepConditions] | None = None

    def gather(self, readings: Readings, measured: Measured, conditions: StepConditions) -> None:
        """Start reducing the ranks' measurements of a step to rank 0."""
        head = (
            measured.step_s,
            measured.loss,
            *(getattr(measured.idle, share, 0.0) for share in Idle.SHARES),
            measured.idle is not None,
            readings.a2a_bytes,
            readings.replica_bytes,
            readings.replica_bytes_plain,
        )
        lanes = [x for axis in AXES for x in vars(readings.lanes[axis]).values()]
        marks = _marks(self._world.grid.world, None if math.isfinite(measured.loss) else self._world.rank)
        mine = torch.cat(
            (
                torch.tensor([*head, *lanes, *marks], dtype=torch.float64),
                readings.dropped.double(),
                readings.load.double().flatten(),
            )
        )
        started = self._world.control.start_reduce(mine, _combine)
        self._pending = started, mine, measured.grad_norm, conditions

    def collect(self) -> "Collected | None":
        """Complete the last `gather` and return the collected step on rank 0; return None on other ranks, or if no
        reduction is pending."""
        if self._pending is None:
            return None
        started, vector, grad_norm, conditions = self._pending
        self._pending = None
        started.wait()
        return self._summary(vector.numpy(), grad_norm, conditions) if self._world.rank == 0 else None

    def _mfu(self, step_s: float, pairs: int) -> float | None:
        """Model FLOPs utilisation of the job; None if the model's FLOPs or the device's peak FLOP/s (as on a
        CPU) are unknown."""
        if self._peak is None:
            return None
        model = self._layout.model
        flops = model_flops(model, self._layout.train.global_batch * model.seq_len, pairs)
        return None if flops is None else flops / step_s / (self._peak * self._world.grid.world)

    def _summary(
        self, vector: NDArray[np.float64], grad_norm: float, conditions: StepConditions
    ) -> "Collected":
        """The summary of a step from the reduced vector. The gradient norm is equal on all ranks."""
        layers, world = self._layout.model.prediction_layers.stop, self._world.grid.world
        head = dict(zip(_HEAD, vector[: len(_HEAD)].tolist(), strict=True))
        start = len(_HEAD)
        lanes = vector[start : start + 3 * len(AXES)].reshape(len(AXES), 3)
        start += 3 * len(AXES)
        marks = vector[start : start + -(-world // MARKED)]
        start += len(marks)
        dropped = vector[start : start + layers].astype(np.int64)
        loads = vector[start + layers :].astype(np.int64).reshape(layers, -1)
        step_s = head["step_s"]
        # On GPUs, a rank does not know its idle time if the GPU has not finished the step.
        idle = {share: head[share] / head["idle_ranks"] for share in Idle.SHARES if head["idle_ranks"]}
        sums = zip(AXES, lanes.tolist(), strict=True)
        comm = {axis: Traffic(int(sent), ms / world, exposed / world) for axis, (sent, ms, exposed) in sums}
        routed = [row for row in loads if row.size and row.sum() > 0]
        skipped = not math.isfinite(grad_norm)
        skips = conditions.skipped_steps + skipped
        replicated = self._world.replicas.size > 1
        summary = Summary(
            step=conditions.step,
            revision=conditions.revision,
            time_s=conditions.time_s,
            loss=head["loss"],
            grad_norm=grad_norm,
            step_ms=step_s * 1e3,
            tokens_per_s=self._layout.train.global_batch * self._layout.model.seq_len / step_s,
            mfu=self._mfu(step_s, int(loads.sum() - dropped.sum())),
            bubble=idle.get("bubble"),
            bubble_bound=idle.get("bound"),
            oversubscribed=self._oversubscribed,
            a2a_bytes=int(head["a2a_bytes"]),
            comm=comm,
            dropped=int(dropped.sum()),
            load_max_over_mean=max((float(row.max() / row.mean()) for row in routed), default=None),
            knobs=conditions.knobs,
            lr=conditions.lr,
            validation_loss=conditions.validation_loss,
            skipped=skipped,
            bubble_parts={part: idle[part] for part in Idle.PARTS} if idle else None,
            loss_scale=conditions.loss_scale,
            skipped_steps=skips if skips or conditions.loss_scale else None,
            replica_bytes=int(head["replica_bytes"]) if replicated else None,
            replica_bytes_plain=int(head["replica_bytes_plain"]) if replicated else None,
            not_finite=_ranks_in(marks)[:RANKS_NAMED],
        )
        return Collected(summary, loads, dropped)


@dataclass(frozen=True)
class Collected:
    """One step of the whole job: its summary, the number of tokens routed to each expert of each layer (`load`), and
    the number of token-expert pairs dropped in each layer."""

    summary: Summary
    load: NDArray[np.int64]  # [layer, expert]
    dropped: NDArray[np.int64]  # [layer]

    def experts(self) -> Experts:
        """A message with the load of every expert, for each layer that has experts."""
        return experts_message(self.summary.step, self.load, self.dropped)

    def loads(self) -> Loads:
        """Summary statistics of the expert load of each layer."""
        return loads_message(self.summary.step, self.load, self.dropped)
