"""The parity harness: a layout against one process, in loss, unclipped gradient norm and every gradient.

One process here is the whole model on one rank, with no process group, no FSDP, no pipeline and a single micro-batch.
A driver process imports torch once and forks the ranks of one case after the other.

Tolerances. In fp64 (used to prove that the arithmetic is the same) rounding is 1e-16 a step and nothing but rounding
may differ: after 20 steps every gradient must agree to 1e-9. In fp32 each case is held to what rounding alone does to
one process: the reference is run once more with weights off by half a unit in the last place (2^-24, relative), and a
layout may differ by no more than MARGIN times as much, at each step.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agents.agent import Agent
from engine.launch import launch
from engine.layout import Layout, from_toml
from engine.meter import Meter
from engine.model.moe import Dials
from engine.model.transformer import Stage
from engine.parallel.comm import Axis
from engine.parallel.tensor import Weights, cross_entropy
from engine.place import Place
from engine.train.data import Samples, read_corpus
from engine.train.optimizer import learning_rate
from engine.train.trainer import Trainer


@dataclass
class Trace:
    """What a run did, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)


def one_process(layout: Layout, steps: int, jolt: float = 0.0) -> Trace:
    """The reference. `jolt` changes each initial weight by that relative amount, up or down."""
    meter = Meter(layout.model.layers, layout.model.moe.experts if layout.model.moe else 0)
    tp, ep = Axis("tp", None, meter), Axis("ep", None, meter)
    train, model = layout.train, layout.model
    knobs = layout.knobs
    dials = Dials("none", knobs.capacity_factor, knobs.aux_loss_coef, 1.0 / train.global_batch)
    stage = Stage(Weights(layout.run.seed, tp, ep), model, range(model.layers), dials, meter)
    if jolt:
        coin = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in stage.parameters():
                p.mul_(1.0 + jolt * (2.0 * torch.randint(0, 2, p.shape, generator=coin) - 1.0))
    samples = Samples(read_corpus(layout.data), model.seq_len, train.global_batch, layout.run.seed)
    matrices = [p for p in stage.parameters() if p.ndim > 1]
    vectors = [p for p in stage.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if train.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=train.lr)
    else:
        optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(0.9, 0.95))
    trace = Trace()
    for step in range(steps):
        meter.start_step(step)
        tokens, targets = samples.batch(step, 0, train.global_batch)
        loss = cross_entropy(stage(tokens), targets, tp) / targets.numel()
        loss.backward()
        trace.losses.append(float(loss))
        trace.grads.append({name: p.grad.clone() for name, p in stage.named_parameters()})
        parameters = list(stage.parameters())
        most = float("inf") if train.grad_clip is None else train.grad_clip
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, most)))
        trace.dropped.append(int(meter.readings.dropped.sum()))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return trace


def as_laid_out(place: Place, layout: Layout, steps: int, out: Path) -> None:
    """The same run on the ranks of `layout`; each stage's first rank saves its part of the trace."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=place.store(), rank=place.rank, world_size=place.world)
    meter = Meter(layout.model.layers, layout.model.moe.experts if layout.model.moe else 0, place.at)
    trainer = Trainer(layout, meter, Agent(None, lambda: meter.doing))
    trace = Trace()
    for step in range(steps):
        meter.start_step(step)
        loss = trainer.forward_backward(step)
        mine = torch.tensor([trainer._counted(loss), float(meter.readings.dropped.sum())], dtype=torch.float64)
        total = trainer.world.control.all_gather(mine).sum(0)
        trace.losses.append(float(total[0]))
        trace.dropped.append(int(total[1]))
        trace.grads.append({n: whole(p.grad) for n, p in trainer.stage.named_parameters()})
        trace.norms.append(trainer.update(step))
    at = trainer.world.at
    if at["dp"] == at["tp"] == 0:
        torch.save(trace, out / f"stage{at['pp']}.pt")
    dist.destroy_process_group()


def whole(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.full_tensor().clone() if isinstance(grad, DTensor) else grad.clone()


def merged(folder: Path) -> Trace:
    """The trace of all stages as one model's."""
    stages = [torch.load(path, weights_only=False) for path in sorted(folder.glob("stage*.pt"))]
    trace: Trace = stages[0]
    for other in stages[1:]:
        assert other.losses == trace.losses and other.norms == trace.norms, "ranks disagree on loss or norm"
        for grads, more in zip(trace.grads, other.grads, strict=True):
            grads |= more
    return trace


def distance(a: Trace, b: Trace) -> dict[str, list[float]]:
    """Relative differences by step: of loss, of norm, and the largest of any one parameter's gradient."""
    assert all(x.keys() == y.keys() for x, y in zip(a.grads, b.grads, strict=True)), "other parameters"
    return {
        "loss": [abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True)],
        "norm": [abs(x - y) / abs(y) for x, y in zip(a.norms, b.norms, strict=True)],
        "gradient": [
            max(float((x[n] - y[n]).norm() / y[n].norm().clamp_min(1e-30)) for n in y)
            for x, y in zip(a.grads, b.grads, strict=True)
        ],
    }
