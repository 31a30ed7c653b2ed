"""Summarises a step of the whole job from the measurements of all ranks.

Each rank sends one vector to rank 0 on the control group, asynchronously; rank 0 reads it one step later. The summary
is therefore one step late, and no step waits for it. Summaries are computed even if there is no hub.
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

_HEAD = (
    "loss",
    "grad_norm",
    "step_s",
    *Idle.SHARES,
    "a2a_bytes",
    "replica_bytes",
    "replica_bytes_plain",
)


class StepSummaries:
    """Gathers the measurements of every rank and summarises them on rank 0."""

    def __init__(self, layout: Layout, world: World, oversubscribed: bool):
        self._layout, self._world, self._oversubscribed = layout, world, oversubscribed
        self._peak = matmul_peak(world.device, layout.train.precision)
        self._pending: tuple[AsyncCollective, list[Tensor], StepConditions] | None = None

    def gather(self, readings: Readings, measured: Measured, conditions: StepConditions) -> None:
        """Start sending this rank's measurements of a step to rank 0."""
        head = (
            measured.loss,
            measured.grad_norm,
            measured.step_s,
            *(getattr(measured.idle, share, 0.0) for share in Idle.SHARES),
            readings.a2a_bytes,
            readings.replica_bytes,
            readings.replica_bytes_plain,
        )
        lanes = [x for axis in AXES for x in vars(readings.lanes[axis]).values()]
        mine = torch.cat(
            (
                torch.tensor([*head, *lanes], dtype=torch.float64),
                readings.dropped.double(),
                readings.load.double().flatten(),
            )
        )
        self._pending = (*self._world.control.start_gather(mine, 0), conditions)

    def collect(self) -> "Collected | None":
        """Complete the last `gather` and return the collected step on rank 0; return None on other ranks, or if no
        `gather` is pending."""
        if self._pending is None:
            return None
        started, rows, conditions = self._pending
        self._pending = None
        started.wait()
        return self._summary(torch.stack(rows).numpy(), conditions) if rows else None

    def _mfu(self, step_s: float, pairs: int) -> float | None:
        """Model FLOPs utilisation of the job; None if the model's FLOPs or the device's peak FLOP/s (as on a
        CPU) are unknown."""
        if self._peak is None:
            return None
        model = self._layout.model
        flops = model_flops(model, self._layout.train.global_batch * model.seq_len, pairs)
        return None if flops is None else flops / step_s / (self._peak * self._world.grid.world)

    def _summary(self, table: NDArray[np.float64], conditions: StepConditions) -> "Collected":
        """The summary of a step from `table`, one row per rank. numpy is faster than torch for such small arrays."""
        layers = self._layout.model.prediction_layers.stop
        head = dict(zip(_HEAD, table[:, : len(_HEAD)].T, strict=True))
        start = len(_HEAD)
        lanes = table[:, start : start + 3 * len(AXES)].reshape(-1, len(AXES), 3)
        start += 3 * len(AXES)
        dropped = table[:, start : start + layers].sum(0).astype(np.int64)
        loads = table[:, start + layers :].sum(0).astype(np.int64).reshape(layers, -1)
        step_s = float(head["step_s"].max())
        idle = {share: float(head[share].mean()) for share in Idle.SHARES}
        piped = self._world.pp.size > 1
        sent, (_, ms, exposed_ms) = lanes[:, :, 0].sum(0).tolist(), lanes.mean(0).T.tolist()
        comm = {axis: Traffic(int(sent[n]), ms[n], exposed_ms[n]) for n, axis in enumerate(AXES)}
        routed = [row for row in loads if row.size and row.sum() > 0]
        skipped = not math.isfinite(float(head["grad_norm"][0]))
        skips = conditions.skipped_steps + skipped
        replicated = self._world.replicas.size > 1
        summary = Summary(
            step=conditions.step,
            revision=conditions.revision,
            time_s=conditions.time_s,
            loss=float(head["loss"].sum()),
            grad_norm=float(head["grad_norm"][0]),
            step_ms=step_s * 1e3,
            tokens_per_s=self._layout.train.global_batch * self._layout.model.seq_len / step_s,
            mfu=self._mfu(step_s, int(loads.sum() - dropped.sum())),
            bubble=idle["bubble"] if piped else None,
            bubble_bound=idle["bound"] if piped else None,
            oversubscribed=self._oversubscribed,
            a2a_bytes=int(head["a2a_bytes"].sum()),
            comm=comm,
            dropped=int(dropped.sum()),
            load_max_over_mean=max((float(row.max() / row.mean()) for row in routed), default=None),
            knobs=conditions.knobs,
            lr=conditions.lr,
            validation_loss=conditions.validation_loss,
            skipped=skipped,
            bubble_parts={part: idle[part] for part in Idle.PARTS} if piped else None,
            loss_scale=conditions.loss_scale,
            skipped_steps=skips if skips or conditions.loss_scale else None,
            replica_bytes=int(head["replica_bytes"].sum()) if replicated else None,
            replica_bytes_plain=int(head["replica_bytes_plain"].sum()) if replicated else None,
            not_finite=np.flatnonzero(~np.isfinite(head["loss"]))[:RANKS_NAMED].tolist(),
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
