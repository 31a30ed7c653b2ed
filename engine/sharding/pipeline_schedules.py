"""Pipeline parallelism: torch's schedules (GPipe, 1F1B, zero-bubble, DualPipeV) over metered stages, or a loop if
there is only one stage.

Shapes: B sequences in a micro-batch, S tokens in a cp slice, s = S/tp, D model width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from engine.config.layout import Layout
from engine.config.schedule_traits import stages_of_rank
from engine.metering.meter import Meter
from engine.model.stage import Stage
from engine.parallel.mesh import World
from engine.parallel.sequences import Sequences
from engine.planner.schedule import ScheduleClock
from engine.sharding.fsdp import Shards

SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

# Dtype of activations by precision; other precisions use torch's default dtype.
ACTIVATIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}

LossOf = Callable[[Tensor, Tensor], Tensor]
"""(logits [B, S, V/tp], targets [B, S]) -> the micro-batch's share of the step's loss."""

WAITING = "waiting for a pipeline neighbour"


class MeteredStage(PipelineStage):
    """A pipeline stage that meters its actions and the bytes that it sends. It sums gradients in the same way under
    every schedule."""

    def __init__(self, meter: Meter, shards: Shards, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._meter, self._shards = meter, shards

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._meter.action("F", self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._meter.set_operation(WAITING)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._meter.action("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._meter.set_operation(WAITING)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._meter.action("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self._shards.accumulate()
        self._meter.set_operation(WAITING)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The messages that open the connections to the neighbours. Torch 2.11 also sends one from a stage to the next
        stage on the same rank, which gloo cannot do."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._metered(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._metered(super().get_bwd_send_ops(bwd_chunk_id))

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        with self._meter.phase("reduce"):
            super().perform_reduce_grad(grad_scale_factor)

    def _metered(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        self._meter.sent("pp", sum(op.tensor.nbytes for op in ops))
        return ops


class Pipeline:
    """Runs the micro-batches of a step, forward and backward, over all stages.

    A plan is an object that runs one schedule with a fixed number of micro-batches. `prepare` takes 1.5-5 ms to build a
    plan. The run switches to a plan when the plan is assigned to the attribute `plan`.
    """

    def __init__(
        self,
        layout: Layout,
        stages: Sequence[Stage],
        shards: Shards,
        world: World,
        meter: Meter,
        loss_of: LossOf,
    ):
        self._layout, self._stages, self._shards, self._world = layout, stages, shards, world
        self._meter, self._loss_of = meter, loss_of
        self.plan = self.prepare(layout.schedule.name, layout.knobs.micro_batches)

    def prepare(self, schedule: str, micro_batches: int) -> "Plan":
        if self._world.pp.size == 1:
            return _Loop(
                self._stages[0],
                self._shards,
                self._world.device,
                self._meter,
                self._loss_of,
                schedule,
                micro_batches,
            )
        return _Scheduled(
            self._layout,
            self._stages,
            self._shards,
            self._world,
            self._meter,
            self._loss_of,
            schedule,
            micro_batches,
        )


class _Loop:
    """Runs the micro-batches of a step one after another, in a run with a single pipeline stage."""

    def __init__(
        self,
        stage: Stage,
        shards: Shards,
        device: torch.device,
        meter: Meter,
        loss_of: LossOf,
        schedule: str,
        micro_batches: int,
    ):
        self.micro_batches = micro_batches
        self.clock = ScheduleClock(schedule, 1, 1, micro_batches)
        self._stage, self._shards, self._meter, self._loss_of = stage, shards, meter, loss_of
        self._device = device

    def run(self, sequences: Sequences) -> Tensor:
        meter = self._meter
        total = torch.zeros((), device=self._device)
        with meter.pipeline():
            for n, part in enumerate(sequences.chunk(self.micro_batches)):
                with meter.action("F", 0, n):
                    loss = self._loss_of(self._stage(part.tokens, part.starts, part.ahead), part.targets)
                with meter.action("B", 0, n):
                    self._shards.before_backward(last=n == self.micro_batches - 1)
                    loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return total


class _Scheduled:
    """Runs the micro-batches of a step over several pipeline stages, with a schedule of `torch.distributed.pipelining`.
    A stage's gradients are reduced after the stage's last backward pass."""

    def __init__(
        self,
        layout: Layout,
        stages: Sequence[Stage],
        shards: Shards,
        world: World,
        meter: Meter,
        loss_of: LossOf,
        schedule: str,
        micro_batches: int,
    ):
        self.micro_batches = micro_batches
        self.clock = ScheduleClock(schedule, world.pp.size, layout.virtual_stages, micro_batches)
        self._meter = meter
        model, B = layout.model, layout.local_batch // micro_batches
        # Give torch the shapes. Otherwise it infers them by running the module on uninitialised data, and each tp rank
        # would route this data differently.
        S = model.seq_len // world.cp.size
        tokens = torch.empty(B, S, dtype=torch.int64, device="meta")
        slice_, share = S // world.tp.size, model.vocab // world.tp.size
        dtype = ACTIVATIONS.get(layout.train.precision)
        hidden = torch.empty(B, slice_, model.d_model, device="meta", dtype=dtype, requires_grad=True)
        logits = torch.empty(
            B * (1 + model.mtp_layers), S, share, device="meta", dtype=dtype, requires_grad=True
        )
        numbers = stages_of_rank(schedule, world.coords["pp"], world.pp.size, layout.virtual_stages)
        end = layout.stages - 1
        self._first, self._last = 0 in numbers, end in numbers
        metered = [
            MeteredStage(
                meter,
                shards,
                stage,
                number,
                layout.stages,
                world.device,
                input_args=(hidden if number else tokens,),
                output_args=(logits if number == end else hidden,),
                group=world.pp.group,
            )
            for number, stage in zip(numbers, stages, strict=True)
        ]
        self._schedule = SCHEDULES[schedule](
            metered if layout.virtual_stages > 1 else metered[0],
            micro_batches,
            loss_fn=self._metered(loss_of),
            scale_grads=False,
        )

    def run(self, sequences: Sequences) -> Tensor:
        losses: list[Tensor] = []
        args = (sequences.tokens,) if self._first else ()
        # torch cuts keyword arguments into micro-batches and gives them to every stage.
        kwargs = {} if sequences.starts is None else {"starts": sequences.starts}
        with self._meter.pipeline():
            if self._last:
                targets = sequences.targets
                kwargs |= {} if (ahead := sequences.ahead) is None else {"targets": ahead}
                self._schedule.step(*args, target=targets, losses=losses, return_outputs=False, **kwargs)
            else:
                self._schedule.step(*args, return_outputs=False, **kwargs)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())

    def _metered(self, loss_of: LossOf) -> LossOf:
        def run(logits: Tensor, targets: Tensor) -> Tensor:
            with self._meter.action_goes_on():
                loss = loss_of(logits, targets)
            self._meter.set_operation(WAITING)
            return loss

        return run


Plan = _Loop | _Scheduled
