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


def optimizer_of(rate: float = 0.5) -> Any:
    """An SGD optimizer of one weight whose gradient is 1, so a step subtracts the learning rate from the weight."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    return torch.optim.SGD([weight], lr=rate)


def schedulers() -> dict[str, Callable[[Any], Any]]:
    from torch.optim import lr_scheduler as kinds
    from torch.optim.swa_utils import SWALR

    def by_hand(optimizer: Any) -> Any:
        numbers = iter(range(1, 99))

        def step() -> None:  # as in nanoGPT, which sets the rate itself
            for group in optimizer.param_groups:
                group["lr"] = 0.5 / (1 + next(numbers))

        return SimpleNamespace(step=step)

    return {
        "by hand": by_hand,
        "none": lambda optimizer: SimpleNamespace(step=lambda: None),
        "LambdaLR": lambda optimizer: kinds.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "StepLR": lambda optimizer: kinds.StepLR(optimizer, 3),
        "CosineAnnealingLR": lambda optimizer: kinds.CosineAnnealingLR(optimizer, 20, eta_min=0.01),
        "CosineAnnealingWarmRestarts": lambda optimizer: kinds.CosineAnnealingWarmRestarts(optimizer, 5),
        "LinearLR": lambda optimizer: kinds.LinearLR(optimizer, 0.1, total_iters=8),
        "MultiplicativeLR": lambda optimizer: kinds.MultiplicativeLR(optimizer, lambda step: 0.9),
        "CyclicLR": lambda optimizer: kinds.CyclicLR(optimizer, 0.1, 0.5, 4, cycle_momentum=False),
        "OneCycleLR": lambda optimizer: kinds.OneCycleLR(
            optimizer, 0.5, total_steps=20, cycle_momentum=False
        ),
        "SWALR": lambda optimizer: SWALR(optimizer, swa_lr=0.05, anneal_epochs=6),
        "SequentialLR": lambda optimizer: kinds.SequentialLR(
            optimizer,
            [kinds.LinearLR(optimizer, 0.1, total_iters=4), kinds.CosineAnnealingLR(optimizer, 20)],
            [4],
        ),
    }


KINDS = (
    *(
        "by hand",
        "none",
        "LambdaLR",
        "StepLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "LinearLR",
    ),
    *("MultiplicativeLR", "CyclicLR", "OneCycleLR", "SWALR", "SequentialLR"),
)


def declared(loop: agents.Loop, *optimizers: Any) -> tuple[LearningRate, Callable[[float], None]]:
    """The knob `lr_scale` of `optimizers`, and a function that sets it as the vote does."""
    rates = LearningRate(*optimizers)
    rates.declare(loop)

    def turn(scale: float) -> None:
        loop._board.commit(1, {"lr_scale": scale}, loop._board.prepare({"lr_scale": scale}))

    return rates, turn


def moved(kind: str, scales: dict[int, float]) -> tuple[list[float], list[float], list[float]]:
    """For each of 12 steps: by how much the weight moved, the learning rate that the adapter reports, and that in the
    optimizer's checkpoint. `scales` maps the index of a step to the factor that is set after this step."""
    optimizer = optimizer_of()
    scheduler = schedulers()[kind](optimizer)
    weight = optimizer.param_groups[0]["params"][0]
    by, reported, saved = [], [], []
    with agents.join("r", hub="none") as loop:
        rates, turn = declared(loop, optimizer)
        for number in range(12):
            before = weight.item()
            reported.append(rates.current() or 0.0)
            optimizer.step()
            by.append(before - weight.item())
            saved.append(optimizer.state_dict()["param_groups"][0]["lr"])
            scheduler.step()
            if number in scales:
                turn(scales[number])
    return by, reported, saved


@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_scales_the_steps_of_any_schedule_and_no_checkpoint(kind: str) -> None:
    pytest.importorskip("torch")
    plain, _, unscaled = moved(kind, {})
    factors = [1.0] * 3 + [0.25] * 4 + [1.0] * 5
    by, reported, saved = moved(kind, {2: 0.25, 6: 1.0})
    assert by == pytest.approx([rate * factor for rate, factor in zip(plain, factors, strict=True)])
    assert reported == pytest.approx(by) and saved == pytest.approx(unscaled)


def test_a_closure_and_a_failed_step_see_the_rates_of_the_program() -> None:
    pytest.importorskip("torch")
    optimizer = optimizer_of()
    (group,) = optimizer.param_groups
    weight = group["params"][0]

    def training_step() -> None:  # Lightning calls the module's `training_step` in a closure
        seen.append(group["lr"])
        group["lr"] /= 2

    def fails() -> None:
        raise KeyError("mine")

    seen: list[float] = []
    with agents.join("r", hub="none") as loop:
        rates, turn = declared(loop, optimizer)
        turn(0.5)
        optimizer.step(training_step)
        assert (seen, group["lr"], weight.item()) == ([0.5], 0.25, -0.125)
        optimizer.step(closure=training_step)
        assert (seen, group["lr"], weight.item()) == ([0.5, 0.25], 0.125, -0.1875)
        with pytest.raises(KeyError):
            optimizer.step(fails)
        assert optimizer.state_dict()["param_groups"][0]["lr"] == group["lr"] == 0.125
        rates.remove()
        optimizer.step()
        assert weight.item() == -0.3125


def test_optimizers_are_found_in_the_wrappers_of_libraries() -> None:
    pytest.importorskip("torch")
    one, two, three = (optimizer_of() for _ in range(3))
    zero = SimpleNamespace(optimizer=one, param_groups=one.param_groups)

    class Chained:  # as Megatron's `ChainedOptimizer`
        chained_optimizers = (SimpleNamespace(optimizer=two), SimpleNamespace(optimizer=None))

        @property
        def optimizer(self) -> Any:
            raise AssertionError("ChainedOptimizer has more than one optimizer")

    chained = Chained()
    container = SimpleNamespace(optimizers=[three, zero])
    with agents.join("r", hub="none") as loop:
        _, turn = declared(loop, zero, chained, container)
        turn(0.5)
        for optimizer in (one, two, three):
            optimizer.step()
            assert optimizer.param_groups[0]["params"][0].item() == -0.25
    foreign = SimpleNamespace(param_groups=[], step=print)
    assert LearningRate(foreign).refusal == "SimpleNamespace is not an optimizer of torch"


# ------------------------------------------------------------------------------------------ axes


def test_axes_of_deepspeed() -> None:
    from agents.loop.adapters.deepspeed import axes_of

    def engine(sequence: int = 1, **mpu: int) -> Any:
        functions = {f"get_{name}": lambda value=value: value for name, value in mpu.items()}
        return SimpleNamespace(
            mpu=SimpleNamespace(**functions) if mpu else None, sequence_parallel_size=sequence
        )

    ranks: Any = SimpleNamespace(rank=5, world=8)
    assert axes_of(engine(), ranks) == {"dp": 5}
    tensor = {"tensor_model_parallel_world_size": 2, "tensor_model_parallel_rank": 1}
    assert axes_of(engine(**tensor, data_parallel_rank=2), ranks) == {"dp": 2, "tp": 1}
    assert axes_of(engine(sequence=2), ranks) == {"dp": 2, "sp": 1}
    ulysses = {"sequence_parallel_world_size": 4, "sequence_parallel_rank": 1}
    assert axes_of(engine(**ulysses), ranks) == {"dp": 1, "sp": 1}
    whole = {"model_parallel_world_size": 8, "model_parallel_rank": 5, "data_parallel_rank": 0}
    assert axes_of(engine(**whole), ranks) == {"tp": 5}


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
