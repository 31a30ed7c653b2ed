"""Tests the Megatron-Bridge callback without the package: a stand-in calls its methods in the same order as
Megatron-Bridge's `train`.

`tests/ranks/adapters/megatron_bridge` tests the callback with the real package.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from agents.loop.adapters.megatron.bridge import CockpitCallback
from agents.protocol import Command, Summary
from tests.unit.agents.loop.adapters.test_adapters import leading
from tests.unit.agents.loop.test_loop import Sent

EVENTS = {f"on_train_{name}" for name in ("start", "step_start", "step_end", "end")} | {
    "on_eval_start",
    "on_eval_end",
}


class Calculator(ModuleType):
    """A stand-in for Megatron's micro-batch calculator, with micro-batches of 2 samples on one rank."""

    value = 2

    def get_num_microbatches(self) -> int:
        return self.value

    def get_current_running_global_batch_size(self) -> int:
        return 2 * self.value

    def reconfigure_num_microbatches_calculator(self, *, global_batch_size: int, **_: object) -> None:
        self.value = global_batch_size // 2


class Bridge:
    """A stand-in for Megatron-Bridge's training on one rank, without a model. `widths`: the number of micro-batches in
    each step; `saved`: the steps after which a checkpoint was saved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **dataset: Any) -> None:
        self.calculator = Calculator("megatron.core.num_microbatches_calculator")
        sizes = {f"get_{name}_parallel_world_size": lambda: 1 for name in ("tensor_model", "context", "data")}
        sizes |= {f"get_{name}_parallel_world_size": lambda: 1 for name in ("pipeline_model", "expert_model")}
        state = SimpleNamespace(
            model_parallel_is_initialized=lambda: True,
            is_pipeline_last_stage=lambda ignore_virtual: True,
            get_tensor_model_parallel_rank=lambda: 0,
            **sizes,
        )
        self.loop = SimpleNamespace(update_num_microbatches=lambda *_, **__: None)
        model = SimpleNamespace(num_moe_experts=None, moe_expert_capacity_factor=None, num_layers=1)
        model.sequence_parallel, model.recompute_granularity, model.seq_length = False, None, 16
        modules: dict[str, Any] = {
            "megatron.core.utils": SimpleNamespace(get_model_config=lambda _: model),
            "megatron.core.parallel_state": state,
            "megatron.core.num_microbatches_calculator": self.calculator,
            "megatron.bridge.training.train": self.loop,
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        self.config = SimpleNamespace(
            train=SimpleNamespace(train_iters=100, micro_batch_size=2),
            checkpoint=SimpleNamespace(save="/runs/big/checkpoints", save_interval=50),
            dataset=SimpleNamespace(**({"dataloader_type": "single"} | dataset)),
            model=model,
            dist=SimpleNamespace(),
        )
        self.state = SimpleNamespace(cfg=self.config, train_state=SimpleNamespace(step=0))
        step = lambda: (True, 1.5, None)  # noqa: E731
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}], step=step, optimizer=None)
        scheduler = SimpleNamespace(get_lr=lambda _: 0.5, step=lambda increment: None)
        chunk = SimpleNamespace(modules=lambda: iter(()), parameters=lambda: iter(()))
        self.context = SimpleNamespace(
            state=self.state, model=[chunk], optimizer=self.optimizer, scheduler=scheduler
        )
        self.callback = CockpitCallback(hub="none")
        self.callback.on_train_start(self.context)
        self.joined: Any = self.callback._training and self.callback._training._loop
        self.widths: list[int] = []
        self.saved: list[int] = []

    def train(self, steps: int) -> None:
        """Train for some steps, unless the training ends earlier."""
        state = self.state.train_state
        for _ in range(steps):
            if state.step >= self.config.train.train_iters:
                return
            self.loop.update_num_microbatches(0, consistency_check=False)
            self.callback.on_train_step_start(self.context)
            self.widths.append(self.calculator.value)
            self.optimizer.step()
            self.context.loss_dict, self.context.grad_norm = {"lm loss": 3.0 - state.step}, 1.5
            self.callback.on_train_step_end(self.context)
            assert self.calculator.value == self.widths[-1], (
                "the samples of the step are counted after its end"
            )
            state.step += 1
            if state.step % self.config.checkpoint.save_interval == 0:
                self.saved.append(state.step)


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Bridge:
    return Bridge(monkeypatch)


def test_events_of_the_package_and_the_steps_that_they_report(bridge: Bridge) -> None:
    sent = Sent(bridge.joined)
    assert {name for name in dir(CockpitCallback) if name.startswith("on_")} == EVENTS
    bridge.train(2)
    summary = sent.of(Summary)[-1]
    assert (summary.step, summary.loss, summary.grad_norm, summary.lr) == (2, 2.0, 1.5, 0.5)
    assert bridge.joined._hello.run == "checkpoints"
    (step,) = [one for one in sent.messages if type(one).__name__ == "Step" and one.step == 2]
    assert step.phases.keys() == {"data, forward, backward", "optimizer"} and step.tokens == 2 * 2 * 16
    bridge.callback.on_eval_start(bridge.context)
    assert bridge.joined.doing[:2] == (2, "evaluation")
    bridge.callback.on_eval_end(bridge.context)
    assert bridge.joined.doing[:2] == (2, "between steps")
    plain = bridge.optimizer.step
    bridge.callback.on_train_end(bridge.context)
    assert bridge.optimizer.step is not plain, "the optimizer is as before"


def test_micro_batches_a_save_and_a_stop_take_effect_after_the_step(bridge: Bridge) -> None:
    acks = leading(bridge.joined, {"num_microbatches": 4, "save": True})
    bridge.train(3)
    assert [ack.state for ack in acks] == ["applied"]
    assert (bridge.widths, bridge.saved) == ([2, 4, 4], [1])
    assert bridge.config.checkpoint.save_interval == 50
    assert bridge.config.train.train_iters == 1 + 99 // 2, "the data of the run last for fewer steps"
    bridge.joined._agent.pending = Command(2, "id", {"num_microbatches": 2}, None)
    bridge.train(1)
    assert (acks[-1].state, acks[-1].why) == (
        "rejected",
        "num_microbatches = 2 is not legal; legal: 4 to 1024",
    )
    bridge.joined._agent.pending = Command(3, "id", {"stop": True}, None)
    bridge.train(5)
    assert bridge.state.train_state.step == 5 and acks[-1].state == "applied"


def test_no_knob_with_the_loader_of_fine_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr("agents.loop.loop.Loop.event", lambda self, text, *_, **__: events.append(text))
    names = [knob.name for knob in Bridge(monkeypatch, dataloader_type="batch").joined._board_message().knobs]
    assert "num_microbatches" not in names and {"lr_scale", "save", "stop"} <= set(names)
    assert any('"batch" divides batches of a fixed size' in text for text in events)
