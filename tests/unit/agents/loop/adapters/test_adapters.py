"""Tests parts of the adapters without the libraries that they adapt; tests/ranks/adapters tests them with the
libraries."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import agents
from agents.loop.adapters.knobs.accumulation import MicroBatches
from agents.loop.adapters.knobs.learning_rate import LearningRate
from agents.loop.adapters.megatron import watch
from agents.loop.adapters.patches import Patches, follow
from agents.protocol import Ack, Command, Event, Experts, Summary
from tests.unit.agents.loop.test_loop import Sent

ADAPTERS = (
    "huggingface",
    "accelerate",
    "lightning",
    "deepspeed",
    "torchtitan",
    "megatron",
    "megatron.bridge",
)


def test_importing_an_adapter_imports_no_other_library() -> None:
    names = ", ".join(f"agents.loop.adapters.{one}" for one in ADAPTERS)
    program = (
        f"import sys, {names}; print({{'torch', 'transformers', 'accelerate', 'numpy'}} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ------------------------------------------------------------------------------------------ a knob that waits


def leading(loop: agents.Loop, changes: dict[str, Any]) -> list[Ack]:
    """Replace the agent of the loop by a fake agent that has a pending command with `changes`. Returns the list to
    which the acks are appended."""
    acks: list[Ack] = []
    pending = Command(1, "id", changes, None)
    agent: Any = SimpleNamespace(
        send=loop._agent.send, wants=lambda *_: True, settle=acks.append, close=print
    )
    agent.pending = pending
    agent.introduce = lambda *_: None
    loop._agent = agent
    return acks


def test_a_change_waits_for_its_step_and_the_log_says_so_once() -> None:
    switched: list[int] = []

    def waits(value: int) -> str:
        if value == 7:
            raise ValueError("7 never works")
        return "" if loop.doing[0] % value == 0 else f"not a multiple of {value}"

    with agents.join("r", hub="none") as loop:
        loop.knob("n", int, (1, 9), value=1, apply=switched.append, loss_neutral=False, waits=waits)
        sent = Sent(loop)
        acks = leading(loop, {"n": 4})
        for number in range(1, 6):
            with loop.step(number):
                pass
        assert (switched, [(ack.state, ack.step) for ack in acks]) == ([4], [("applied", 5)])
        assert [event.text for event in sent.of(Event)] == ["n = 4 waits: not a multiple of 4"]
    with agents.join("r", hub="none") as loop:
        loop.knob("n", int, (1, 9), value=1, apply=switched.append, loss_neutral=False, waits=waits)
        acks = leading(loop, {"n": 7})
        with loop.step(1):
            pass
        assert [(ack.state, ack.why) for ack in acks] == [("rejected", "7 never works")]


def test_the_legal_values_of_a_knob_may_change() -> None:
    now = [2]
    with agents.join("r", hub="none") as loop:
        loop.knob("n", int, lambda: (now[-1], 8), value=2, apply=now.append, loss_neutral=False)
        acks = leading(loop, {"n": 4})
        with loop.step(1):
            pass
        loop._agent.pending = Command(2, "id", {"n": 2}, None)  # type: ignore[misc]
        with loop.step(2):
            pass
        assert [(ack.state, ack.why) for ack in acks] == [
            ("applied", ""),
            ("rejected", "n = 2 is not legal; legal: 4 to 8"),
        ]
        assert loop._board_message().knobs[0].legal.low == 4


def test_actions_and_expert_loads_of_a_loop() -> None:
    done: list[str] = []
    with agents.join("r", hub="none") as loop:
        loop.action("save", lambda: done.append("save"))
        loop.action("stop", lambda: done.append("stop"), ends=True)
        with pytest.raises(ValueError, match="knob save is declared twice"):
            loop.action("save", print)
        assert [(knob.action, knob.ends) for knob in loop._board_message().knobs] == [
            (True, False),
            (True, True),
        ]
        sent = Sent(loop)
        acks = leading(loop, {"save": True})
        with loop.step() as step:
            step.report(loss=1.0)
            step.report_experts({3: [1, 2, 3], 5: [0, 0, 0]}, dropped={3: 2})
        assert (done, acks[0].state) == (["save"], "applied")
        (summary,), (experts,) = sent.of(Summary), sent.of(Experts)
        assert (summary.load_max_over_mean, summary.dropped) == (1.5, 2)
        layers = [(layer.layer, layer.load, layer.dropped) for layer in experts.layers]
        assert layers == [(3, [1, 2, 3], 2), (5, [0, 0, 0], 0)]


# ------------------------------------------------------------------------------------------ accumulation


def test_the_accumulation_changes_only_at_a_multiple_or_at_the_end_of_an_epoch() -> None:
    state = SimpleNamespace(global_step=0, epoch=0.0, max_steps=100)
    done = MicroBatches(range(10), state, SimpleNamespace(gradient_accumulation_steps=2))
    done.begin_epoch()
    free: dict[int, list[int]] = {}
    for number in range(1, 11):
        done.count()
        free[number] = [value for value in (1, 2, 3, 4) if not done.wait(value)]
    assert (free[2], free[4], free[6], free[10]) == ([1, 2], [1, 2, 4], [1, 2, 3], [1, 2, 3, 4])
    done.begin_epoch()
    for _ in range(3):
        done.count()
    assert "3 micro-batches of this epoch are done" in done.wait(2)


def test_micro_batches_that_a_resumed_run_skipped_count() -> None:
    # Resumed after 6 of the 10 micro-batches of the second epoch; the next update takes two more.
    state = SimpleNamespace(global_step=8, epoch=1.6, max_steps=100)
    done = MicroBatches(range(10), state, SimpleNamespace(gradient_accumulation_steps=2))
    done.begin_epoch()
    for _ in range(2):
        done.count()
    state.epoch = 1.8
    done.end_update()
    assert [value for value in (2, 3, 4, 8) if not done.wait(value)] == [2, 4, 8]


# ------------------------------------------------------------------------------------------ learning rate


def schedulers() -> dict[str, Callable[[Any], Any]]:
    from torch.optim import lr_scheduler as kinds

    return {
        "LambdaLR": lambda optimizer: kinds.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "StepLR": lambda optimizer: kinds.StepLR(optimizer, 3),
        "CosineAnnealingLR": lambda optimizer: kinds.CosineAnnealingLR(optimizer, 20, eta_min=0.01),
        "CosineAnnealingWarmRestarts": lambda optimizer: kinds.CosineAnnealingWarmRestarts(optimizer, 5),
        "LinearLR": lambda optimizer: kinds.LinearLR(optimizer, 0.1, total_iters=8),
        "CyclicLR": lambda optimizer: kinds.CyclicLR(optimizer, 0.1, 0.5, 4),
        "SequentialLR": lambda optimizer: kinds.SequentialLR(
            optimizer,
            [kinds.LinearLR(optimizer, 0.1, total_iters=4), kinds.CosineAnnealingLR(optimizer, 20)],
            [4],
        ),
        "none": lambda optimizer: None,
    }


NAMES = (
    *("LambdaLR", "StepLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "LinearLR", "CyclicLR"),
    *("SequentialLR", "none"),
)


def rates(kind: str, scales: dict[int, float]) -> list[float]:
    """The learning rate of each of 12 optimizer steps. `scales` maps the index of a step to the learning-rate factor
    that is set after this step."""
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = schedulers()[kind](optimizer)
    learning_rate = LearningRate(optimizer, scheduler)
    seen = []
    for number in range(12):
        seen.append(learning_rate.current())
        optimizer.step()
        if scheduler:
            scheduler.step()
        if number in scales:
            learning_rate.set_scale(scales[number])
    return seen


@pytest.mark.parametrize("kind", NAMES)
def test_a_factor_scales_every_later_rate_of_a_scheduler(kind: str) -> None:
    pytest.importorskip("torch")
    plain = rates(kind, {})
    factors = [1.0] * 3 + [0.25] * 4 + [1.0] * 5
    scaled = rates(kind, {2: 0.25, 6: 1.0})
    assert scaled == pytest.approx([rate * factor for rate, factor in zip(plain, factors, strict=True)])


def test_a_resumed_run_starts_with_the_factor_of_its_checkpoint() -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = schedulers()["LambdaLR"](optimizer)
    LearningRate(optimizer, scheduler).set_scale(0.25)
    assert LearningRate(optimizer, scheduler).scale == 0.25
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9)
    assert LearningRate(optimizer, cycle).refusal == "lr_scale does not work with the scheduler OneCycleLR"


# ------------------------------------------------------------------------------------------ hooks


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_experts_are_counted_once_in_training_also_when_recomputed(reentrant: bool | None) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    from agents.loop.adapters.expert_load import ExpertLoad
    from agents.loop.adapters.torch_ranks import TorchRanks

    class TopKRouter(torch.nn.Module):  # type: ignore[name-defined,misc]
        num_experts, top_k = 3, 2

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([3.0, 2.0, 1.0]))

        def forward(self, x: Any) -> Any:
            logits = x[:, None] * self.weight
            values, chosen = logits.topk(2)
            return logits, values, chosen

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Identity(), TopKRouter()])
    load = ExpertLoad(model, TorchRanks())
    x = torch.tensor([1.0, 1.0, -1.0], requires_grad=True)
    router = model.layers[1]
    run = router if reentrant is None else lambda x: checkpoint(router, x, use_reentrant=reentrant)
    run(x)[1].sum().backward()
    assert load.total(1) == {1: [2, 3, 1]}
    assert load.total(2) == {1: [0, 0, 0]}
    model.eval()
    router(x)
    assert load.total(3) == {1: [0, 0, 0]}


def test_patches_restore_the_wrapped_methods() -> None:
    class Owner:
        def double(self, x: int) -> int:
            return 2 * x

    one, patches = Owner(), Patches()
    patches.wrap(one, "double", lambda original, x: original(x) + 1)
    patches.wrap(one, "double", lambda original, x: original(x) + 10)
    assert (one.double(4), Owner().double(4)) == (19, 8)
    patches.undo()
    assert (one.double(4), vars(one)) == (8, {})


def test_follows_a_loader_but_not_a_list() -> None:
    class Loader:
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

    def doubled(batches: Iterator[int]) -> Iterator[int]:
        return (2 * batch for batch in batches)

    loader, batches = Loader(), [1, 2]
    assert follow(loader, doubled) and list(loader) == [2, 4]
    assert not follow(batches, doubled) and list(batches) == [1, 2]
    assert not follow((batch for batch in batches), doubled)


def test_megatron_watch_refuses_another_function() -> None:
    with pytest.raises(ValueError, match="needs the function pretrain of megatron"):
        watch(print)
