"""The trainer in a run with one rank in this process."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from agents.protocol import Event, Message, Step, Summary
from agents.rank.agent import Agent
from engine.config.toml import load
from engine.launch.rank_main import check_same_layout
from engine.metering.meter import Meter
from engine.planner.hardware.peaks import step_flops
from engine.rendezvous import single_rank_context
from engine.train.trainer import Trainer
from tests.ranks.cases.case import SMALL
from tests.unit.engine.config.test_layout import DEMO


class SilentAgent(Agent):
    """An agent that stores its messages instead of sending them."""

    def __init__(self) -> None:
        super().__init__(None, lambda: (0, "", 0.0))
        self.messages: list[Message] = []

    def send(self, *messages: Message) -> None:
        self.messages += messages


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    dist.init_process_group("gloo", store=single_rank_context(tmp_path).store(), rank=0, world_size=1)
    yield Trainer(load(DEMO, [*SMALL, "train.steps=3"]), Meter(2, 8), SilentAgent())
    dist.destroy_process_group()


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.stages[0].parameters()]


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_does_not_change_the_weights(
    trainer: Trainer, norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = trainer.agent
    assert isinstance(agent, SilentAgent)
    before = weights(trainer)
    with monkeypatch.context() as patched:
        patched.setattr(type(trainer.computation.norm), "__call__", lambda _: torch.tensor(norm))
        trainer.train_step(0)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    trainer.train_step(1)
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert any(isinstance(m, Event) and "step 0: the gradient norm is" in m.text for m in agent.messages)
    summaries = [message for message in agent.messages if isinstance(message, Summary)]
    assert [summary.skipped for summary in summaries] == [True]


def test_every_step_is_reported_once_and_the_last_one_too(trainer: Trainer) -> None:
    agent = trainer.agent
    assert isinstance(agent, SilentAgent)
    last = trainer.run()
    steps = [message.step for message in agent.messages if isinstance(message, Summary)]
    assert steps == [0, 1, 2]
    assert last is not None and last.step == 2 and last.tokens_per_s > 0


def test_mfu_is_model_flops_over_the_devices_peak(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = 1e12
    unknown = trainer.run()
    assert unknown is not None and unknown.mfu is None, "of a CPU"
    monkeypatch.setattr("engine.telemetry.step_summary.matmul_peak", lambda _device, _precision: peak)
    last = Trainer(trainer.layout, Meter(2, 8), SilentAgent()).run()
    model, tokens = trainer.layout.model, 8 * 32
    assert last is not None
    asked = step_flops(model, tokens, pairs=2 * 2 * tokens)  # two layers, top-2, no dropped pairs
    assert last.mfu == pytest.approx(asked / (last.step_ms / 1e3) / peak)


def test_ranks_with_other_layouts_refuse_to_start(tmp_path: Path) -> None:
    leader = single_rank_context(tmp_path)
    other = dataclasses.replace(leader, rank=1, world=2)
    check_same_layout(load(DEMO), leader, leader.store())
    check_same_layout(load(DEMO, ["run.name=mine"]), other, leader.store())
    with pytest.raises(ValueError, match="rank 1 has a different layout than rank 0"):
        check_same_layout(load(DEMO, ["knobs.micro_batches=8"]), other, leader.store())


def test_callbacks_get_every_step_and_may_stop(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=single_rank_context(tmp_path).store(), rank=0, world_size=1)
    steps: list[int] = []
    losses: list[float] = []

    def on_step(record: Step) -> None:
        steps.append(record.step)
        if record.step == 1:
            trainer.stop()

    layout = load(DEMO, [*SMALL, "train.steps=9"])
    trainer = Trainer(layout, on_step=on_step, on_summary=lambda summary: losses.append(summary.loss))
    trainer.run()
    dist.destroy_process_group()
    assert steps == [0, 1, 2] and len(losses) == 3


def test_the_library_needs_no_torch_for_a_layout() -> None:
    code = "import sys, engine; engine.load(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(DEMO)], check=True)
