"""fp16: the loss scale follows torch's GradScaler, an overflow skips the step, and the auxiliary losses are scaled."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from agents.protocol import Event, Message, Summary
from agents.rank.agent import Agent
from engine.config.sections.training import LossScale
from engine.config.toml import load
from engine.metering.meter import Meter
from engine.parallel.local_shards import local_shard
from engine.rendezvous import single_rank_context
from engine.sharding.fsdp import named_parameters
from engine.train.optimization.loss_scaling import LossScaler
from engine.train.trainer import Trainer
from tests.ranks.cases.case import SMALL
from tests.unit.engine.config.test_layout import DEMO

LOSSES = ["knobs.aux_loss_coef=1.0", "knobs.z_loss_coef=0.5"]


class Listener(Agent):
    def __init__(self) -> None:
        super().__init__(None, lambda: (0, "", 0.0))
        self.events: list[Event] = []
        self.summaries: list[Summary] = []

    def send(self, *messages: Message) -> None:
        self.events += [message for message in messages if isinstance(message, Event)]
        self.summaries += [message for message in messages if isinstance(message, Summary)]


Make = Callable[..., tuple[Trainer, Listener]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    dist.init_process_group("gloo", store=single_rank_context(tmp_path).store(), rank=0, world_size=1)

    def trainer(*overrides: str, **more: Path) -> tuple[Trainer, Listener]:
        listener = Listener()
        layout = load(DEMO, [*SMALL, *LOSSES, "train.steps=8", *overrides])
        return Trainer(layout, Meter(2, 8), listener, **more), listener

    yield trainer
    dist.destroy_process_group()


@pytest.mark.parametrize("seed", range(4))
def test_scale_follows_the_rule_of_torch(seed: int) -> None:
    chance = random.Random(seed)
    settings = LossScale(initial=1024.0, growth=2.0, backoff=0.5, interval=3)
    ours = LossScaler(settings)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs = torch.amp.GradScaler(
        "cpu", settings.initial, settings.growth, settings.backoff, settings.interval
    )
    skipped = 0
    for _ in range(60):
        finite = chance.random() < 0.8
        theirs.scale(torch.zeros(()))  # GradScaler creates its tensors on first use
        weight.grad = torch.full((3,), 1.0 if finite else float("inf"))
        theirs.step(optimizer)
        theirs.update()
        ours.update(finite)
        skipped += not finite
        assert (ours.scale, ours.good_steps) == (theirs.get_scale(), theirs._get_growth_tracker())
    assert ours.skipped == skipped > 0


def test_without_fp16_nothing_is_scaled() -> None:
    scaler, grad = LossScaler(None), torch.ones(2)
    assert [scaler.update(finite) for finite in (True, False)] == ["", ""]
    scaler.unscale([grad])
    assert (scaler.scale, scaler.skipped, grad.tolist()) == (1.0, 1, [1.0, 1.0])


def test_overflow_skips_the_step_and_halves_the_scale(make: Make) -> None:
    trainer, listener = make(
        "train.precision=fp16", f"loss_scale.initial={2.0**32}", "loss_scale.backoff=0.001"
    )
    weights = [local_shard(p.detach()).clone() for _, p in named_parameters(trainer.stages)]
    trainer.train_step(0)
    assert all(
        torch.equal(local_shard(p.detach()), before)
        for (_, p), before in zip(named_parameters(trainer.stages), weights, strict=True)
    )
    assert trainer.computation.loss_scaler.scale == 2.0**32 * 0.001
    said = [event for event in listener.events if "overflowed in fp16" in event.text]
    assert [event.level for event in said] == ["warning"]
    assert "the loss scale goes from 4.29497e+09 to 4.29497e+06" in said[0].text
    for step in range(1, 4):  # at most two more steps overflow, with the scales 4e6 and 4e3
        trainer.train_step(step)
    scaler = trainer.computation.loss_scaler
    assert scaler.good_steps == 4 - scaler.skipped > 0
    trainer.close()
    first, *_, last = listener.summaries
    assert (first.loss_scale, first.skipped, first.skipped_steps) == (2.0**32, True, 1)
    assert (last.loss_scale, last.skipped, last.skipped_steps) == (scaler.scale, False, scaler.skipped)
    assert first.validation_loss is last.validation_loss is None
    assert any(
        not torch.equal(local_shard(p.detach()), before)
        for (_, p), before in zip(named_parameters(trainer.stages), weights, strict=True)
    )


def test_gradients_and_loss_do_not_depend_on_the_scale(make: Make) -> None:
    """The test includes the gradients of the auxiliary losses, which dominate the routers' gradients here."""
    found = []
    for scale in (1.0, 512.0):
        trainer, _ = make("train.precision=fp16", f"loss_scale.initial={scale}")
        trainer.meter.start_step(0)
        loss = trainer.computation.counted_loss(trainer.computation.forward_backward(0))
        grads = {name: local_shard(p.grad).clone() for name, p in named_parameters(trainer.stages)}
        found.append((loss, grads))
    (loss, grads), (scaled_loss, scaled) = found
    assert scaled_loss == pytest.approx(loss, rel=1e-6)
    for name, grad in grads.items():
        assert float((scaled[name] - grad).norm() / grad.norm()) < 0.02, name


def test_scale_is_saved_and_resumed(make: Make, tmp_path: Path) -> None:
    fp16 = ("train.precision=fp16", "loss_scale.interval=3", "checkpoint.every=4", "loss_scale.initial=256.0")
    trainer, _ = make(*fp16, checkpoints_dir=tmp_path / "saved")
    for step in range(4):
        trainer.train_step(step)
    trainer.close()
    scaler = trainer.computation.loss_scaler
    assert (scaler.scale, scaler.good_steps) == (512.0, 1)
    resumed, _ = make(*fp16, resume=tmp_path / "saved/step-4")
    assert resumed.computation.loss_scaler == scaler
