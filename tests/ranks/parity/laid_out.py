"""The run that is compared with the reference: the same steps on the ranks of a layout."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agents.protocol import Value
from engine.config.layout import Layout
from engine.control import expert_placement
from engine.device import BACKENDS, DeviceChoice, choose_device, set_device
from engine.metering.meter import Meter
from engine.rendezvous import RankContext
from engine.sharding.expert_rows import moe_layers
from engine.sharding.fsdp import EMBEDDING, named_parameters
from engine.train.trainer import Trainer
from tests.ranks.cases.case import Script
from tests.ranks.parity.one_process import ROUNDED
from tests.ranks.parity.routing import fix_routing
from tests.ranks.parity.trace import Operator, Trace, alike, router_biases, whole


def as_laid_out(
    context: RankContext, layout: Layout, script: Script, steps: int, out: Path, device: DeviceChoice
) -> None:
    """The same run as `one_process`, but on the ranks of `layout`. The first rank of each stage saves its part of the
    trace."""
    where = choose_device(context.local_rank, context.local_world, device)
    set_device(where)
    dist.init_process_group(
        BACKENDS[where.type],
        store=context.store(),
        rank=context.rank,
        world_size=context.world,
        device_id=where if where.type == "cuda" else None,
    )
    meter = Meter(
        layout.model.prediction_layers.stop,
        layout.model.moe.experts if layout.model.moe else 0,
        context.set_operation,
        where,
    )
    trace = Trace()
    trainer = Trainer(layout, meter, Operator(script, meter, trace))
    if layout.train.precision in ROUNDED:
        fix_routing(trainer.stages)
    if script and context.rank == refusing_rank(context.world):
        trainer.board.prepare = lambda changes, prepare=trainer.board.prepare: (
            _only_small(changes) or prepare(changes)
        )
    if context.rank == 1:
        expert_placement.Move = _no_room_at_first(expert_placement.Move)
    for step in range(steps):
        meter.start_step(step)
        trainer.steering.vote.begin(step, stop=False)
        loss = trainer.computation.forward_backward(step)
        mine = torch.tensor(
            [trainer.computation.counted_loss(loss), float(meter.readings.dropped.sum())], dtype=torch.float64
        )
        total = trainer.world.control.all_gather(mine).sum(0)
        trace.losses.append(float(total[0]))
        trace.dropped.append(int(total[1]))
        trace.loads.append(trainer.world.control.all_gather(meter.readings.load.cpu()).sum(0))
        trace.grads.append(logical(trainer))
        trace.maps.append({n: layer.placement.logical for n, layer in moe_layers(trainer.stages).items()})
        trace.norms.append(norm := trainer.computation.gradient_norm())
        trainer.computation.update(step, norm)
        biases = (router_biases(stage) for stage in trainer.stages)
        trace.biases.append({name: whole(bias) for stage in biases for name, bias in stage.items()})
        trainer.steering.vote.end(step)
    for name, p in named_parameters(trainer.stages):
        if name == EMBEDDING:
            alike(trace.embeddings, {name: whole(p.detach())})
    if trainer.computation.average:
        with trainer.computation.average.in_use():
            trace.averages = logical(trainer, lambda p: p.detach())
    trace.knobs = trainer.board.values
    at = trainer.world.coords
    if at["dp"] == at["cp"] == at["tp"] == 0:
        torch.save(trace, out / f"stage{at['pp']}.pt")
    dist.destroy_process_group()


def refusing_rank(world: int) -> int:
    """The rank that the test makes vote against a change to 16 micro-batches, as if the rank had too little memory.
    This rank is on the last stage and is not the leader."""
    return min(5, world - 1)


def _only_small(changes: dict[str, Value]) -> None:
    """Make this rank refuse a change to 16 micro-batches, to simulate that only this rank is out of memory."""
    if changes.get("micro_batches") == 16:
        raise ValueError("this rank has no room for 16 micro-batches")


def _no_room_at_first(move: Callable[..., object]) -> Callable[..., object]:
    """Make the first move of experts fail on this rank, before anything is sent."""
    calls: list[object] = []

    def refuse_once(*args: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError("this rank has no room for experts")
        return move(*args)

    return refuse_once


def logical(
    trainer: Trainer, of: Callable[[nn.Parameter], Tensor | None] = lambda p: p.grad
) -> dict[str, Tensor]:
    """Maps each parameter's name to an unsharded tensor of this parameter: the result of the function `of`, by default
    the gradient. Experts are in the order of their logical numbers, independent of their placement."""
    grads: dict[str, Tensor] = {}
    for name, p in named_parameters(trainer.stages):
        alike(grads, {name: whole(of(p))})
    for n, layer in moe_layers(trainer.stages).items():
        slots = torch.tensor(layer.placement.logical).argsort()
        for name, _ in layer.experts.named_parameters():
            prefix = f"mtp.{n}.block" if n in trainer.layout.model.prediction_layers else f"layers.{n}"
            grads[f"{prefix}.mlp.experts.{name}"] = grads[f"{prefix}.mlp.experts.{name}"][slots]
    return grads
