"""`cockpit wrap`: the environment of the wrapped program, its reported steps and its knobs; an error in the cockpit's
code must not break the program."""

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agents.protocol import Ack, Command, Step, Summary
from agents.protocol.base import RunError
from agents.rank.agent import Agent
from agents.wrap.command import STARTUP, ignores_startup, wrapped_environment
from agents.wrap.exchange import ClosedError, StoreRanks
from agents.wrap.hooks import Hooks
from agents.wrap.joining import joins_itself
from agents.wrap.optimizers import MainOptimizer
from agents.wrap.rounds import Report, Rounds, decide
from agents.wrap.sensors.phases import Phases
from agents.wrap.watch import Watch

torch = pytest.importorskip("torch")

# ------------------------------------------------------------------------------------------ processes


def python(program: str, tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=wrapped_environment(os.environ | environ, None, "none"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )


def test_a_process_without_torch_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.users_own = True")
    program = (
        "import sys; print(sys.users_own, sys.modules['sitecustomize'].__file__, "
        "[one for one in sys.modules if one.split('.')[0] in ('torch', 'agents', 'zmq')], "
        f"{str(STARTUP)!r} in sys.path); sys.exit(3)"
    )
    done = python(program, tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == f"True {tmp_path / 'sitecustomize.py'} [] False\n"


def test_a_program_with_its_own_package_agents_runs_without_the_cockpit(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").write_text("mine = 1")
    (tmp_path / "torch.py").write_text("loaded = True")
    done = python("import torch, agents; print(torch.loaded, agents.mine, torch.__loader__)", tmp_path)
    assert done.stdout.startswith("True 1 <_frozen_importlib_external.SourceFileLoader")
    assert done.stderr == (
        "cockpit wrap: the program runs without the cockpit: "
        f"the program has another package `agents`, in {tmp_path / 'agents'}\n"
    )


FOUND_FIRST = {
    "its spec was asked for": "importlib.util.find_spec('torch')",
    "its spec was asked for twice": "[importlib.util.find_spec('torch') for _ in range(2)]",
    "its first import failed": """
try:
    sys.broken = True
    import torch
except ImportError:
    del sys.broken
""",
    "it is loaded later": """
spec = importlib.util.find_spec('torch')
spec.loader = importlib.util.LazyLoader(spec.loader)
sys.modules['torch'] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules['torch'])
""",
    "the finders were replaced": "sys.meta_path = list(sys.meta_path)",
}


@pytest.mark.parametrize("first", FOUND_FIRST.values(), ids=FOUND_FIRST)
def test_torch_is_followed_however_it_was_looked_up_before(tmp_path: Path, first: str) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").touch()
    (tmp_path / "torch.py").write_text(
        "import sys\nif hasattr(sys, 'broken'): raise ImportError\nloaded = True"
    )
    done = python(f"import importlib.util, sys\n{first}\nimport torch; print(torch.loaded)", tmp_path)
    assert done.stdout == "True\n" and done.stderr.count("the program has another package `agents`") == 1


def test_a_loader_that_cannot_be_followed_is_reported(tmp_path: Path) -> None:
    program = """
import importlib.machinery, sys
class Loader:
    __slots__ = ()
    def create_module(self, spec): pass
    def exec_module(self, module): module._C = 1
class Finder:
    def find_spec(name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, Loader()) if name == "torch" else None
sys.meta_path.insert(1, Finder)
import torch; print(torch._C)
"""
    done = python(program, tmp_path)
    assert (done.stdout, done.stderr) == (
        "1\n",
        "cockpit wrap: the program runs without the cockpit: torch was imported by a loader that cannot be followed\n",
    )


def test_a_forked_process_does_not_count_as_having_joined_by_itself() -> None:
    agent = Agent(None, lambda: (0, "", 0.0))
    assert joins_itself()
    if (child := os.fork()) == 0:
        os._exit(joins_itself())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    agent.close()
    assert not joins_itself()


def test_a_command_that_does_not_exist_is_refused() -> None:
    from agents.wrap.command import wrap

    with pytest.raises(RunError, match="there is no command no-such-command"):
        wrap(["no-such-command"])


@pytest.mark.parametrize(
    "words",
    [
        "python -I train.py",
        "/usr/bin/python3.11 -BE train.py",
        "python -u -S train.py",
        "python -X dev -I train.py",
    ],
)
def test_an_interpreter_that_ignores_the_hooks_is_found(words: str) -> None:
    assert ignores_startup(words.split())


@pytest.mark.parametrize(
    "words",
    ["python train.py -I", "python -m train -E", "python -W I train.py", "python -c pass -S", "torchrun -I"],
)
def test_other_commands_have_the_hooks(words: str) -> None:
    assert not ignores_startup(words.split())


# ------------------------------------------------------------------------------------------ a training in this process


def training(steps: int, accumulation: int = 1, rates: list[float] | None = None) -> Any:
    """The losses of a tiny training run with a learning-rate scheduler."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    data = torch.utils.data.DataLoader(torch.randn(steps * accumulation, 4))
    losses = []
    for number, batch in enumerate(data):
        loss = model(batch).square().mean() / accumulation
        loss.backward()
        losses.append(loss.item())
        if number % accumulation == accumulation - 1:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if rates is not None:
                rates.append(optimizer.param_groups[0]["lr"])
            time.sleep(0.002)
    return losses


class Watched:
    """Monitors this process with a `Watch`, as `cockpit wrap` does. `sent`: the messages and acks that the agent sends
    after the process has joined a run."""

    def __init__(self) -> None:
        self.hooks = Hooks()
        self.watch = Watch(self.hooks)
        self.sent: list[Any] = []
        self.pending: Command | None = None
        self.hooks.guarded(self.watch.listen)
        enter = self.watch._enter_run

        def entered() -> None:
            enter()
            if loop := self.watch._loop:
                agent: Any = loop._agent
                agent.send = lambda *messages: self.sent.extend(messages)
                agent.settle = lambda ack: self.sent.append(ack)
                type(agent).pending = property(lambda _: self.pending)
                loop._stride = 1

        self.watch._enter_run = entered  # type: ignore[method-assign]

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.sent if isinstance(one, kind)]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setenv("COCKPIT_WRAP_HUB", "none")
    monkeypatch.setattr("agents.wrap.joining.joins_itself", lambda: False)
    monkeypatch.setattr("agents.rank.agent.Agent.pending", None)
    monkeypatch.setattr("agents.wrap.rounds.RECORD_S", 0.0)
    monkeypatch.setattr("agents.wrap.rounds.ROUND_S", 0.0)
    one = Watched()
    yield one
    one.hooks.end()


def test_a_watched_training_is_the_same_and_is_reported(watched: Watched) -> None:
    losses = training(150, accumulation=2)
    steps, summaries = watched.of(Step), watched.of(Summary)
    assert steps[-1].step == 150 and len(steps) > 20
    assert [one.step for one in summaries] == [one.step for one in steps]
    for step, summary in zip(steps, summaries, strict=True):
        first = 2 * (step.step - 1)
        assert step.loss == summary.loss == pytest.approx(losses[first] + losses[first + 1])
        assert set(step.phases) == {"data", "forward", "backward", "optimizer"}
        assert 0 < sum(step.phases.values()) <= step.step_ms
        assert step.memory_bytes > 1e7
    watched.hooks.end()
    assert losses == training(150, accumulation=2)
    assert "wrap" not in repr(torch.Tensor.backward.__code__)


def test_the_traffic_of_fsdp2_is_counted_once(watched: Watched) -> None:
    """FSDP2 calls a function that has another name in torch 2.13 than in earlier versions. In torch 2.13, the function
    with the old name calls the one with the new name."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        model = torch.nn.Linear(4, 8, bias=False)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        traffic = watched.watch._traffic
        traffic.take()
        model(torch.ones(1, 4)).sum().backward()
        shard = 4 * 4 * 8 // 2
        assert traffic.take()["dp"].bytes == shard + shard  # one all-gather, one reduce-scatter
        out, x = torch.ones(8), torch.ones(4)
        with pytest.warns() if hasattr(dist, "all_gather_single") else nullcontext():
            # Autograd calls FSDP2 in another thread on GPUs, where no phase of the watch is in progress.
            thread = threading.Thread(target=lambda: dist.all_gather_into_tensor(out, x))
            thread.start()
            thread.join()
            dist.reduce_scatter_tensor(x, out)
        assert traffic.take()["dp"].bytes == 4 * 4 + 4 * 4
    finally:
        dist.destroy_process_group()


def test_a_factor_on_the_rate_is_in_force_in_the_step_only(watched: Watched) -> None:
    plain: list[float] = []
    training(40, rates=plain)
    moved: list[float] = []
    watched.watch._rates.scale = 0.5
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(3):
        parameter.grad = torch.ones(1)
        optimizer.step()
        moved.append(optimizer.param_groups[0]["lr"])
    assert (moved, parameter.item()) == ([1.0] * 3, -1.5)
    optimizer.step = lambda: None
    rates: list[float] = []
    training(40, rates=rates)
    assert rates == plain


def test_stop_and_factor_by_command(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    watched.pending = Command(1, "one", {"lr_scale": 0.25}, None)
    training(100)
    (ack,) = watched.of(Ack)
    assert (ack.state, watched.watch._rates.scale) == ("applied", 0.25)
    watched.pending = Command(2, "two", {"stop": True}, None)
    with pytest.raises(SystemExit) as stopped:
        training(100)
    assert stopped.value.code == 0
    assert "as an operator requested" in capsys.readouterr().err
    training(5)  # nothing of ours is left


@pytest.mark.parametrize(
    "place", ["_losses.backward", "_optimizers.stepped", "_traffic.take", "_forwards.follow"]
)
def test_an_error_of_ours_ends_the_watch_and_is_reported_once(
    watched: Watched, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    part, name = place.split(".")

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    setattr(getattr(watched.watch, part), name, fail)
    losses = training(60)
    said = capsys.readouterr().err
    assert said == "cockpit wrap: the program continues without the cockpit: ZeroDivisionError: ours\n"
    assert not watched.hooks.on and losses == training(60)


def test_a_program_that_closes_what_it_has_not_opened_is_left_before(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    training(60)
    assert watched.watch._loop
    reading, writing = os.pipe()
    os.close(reading)
    os.closerange(writing, writing + 1)
    assert watched.hooks.on and capsys.readouterr().err == ""
    wakes = os.eventfd(0)  # as libzmq has them
    os.closerange(wakes, wakes + 1)
    assert not watched.hooks.on and watched.watch._loop is None
    assert "closes file descriptors that it has not opened" in capsys.readouterr().err
    with pytest.raises(OSError):
        os.fstat(wakes)


def test_exceptions_of_the_program_pass_through(watched: Watched) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def closure() -> float:
        raise KeyError("the program's")

    for _ in range(3):
        with pytest.raises(KeyError):
            optimizer.step(closure)
    assert watched.hooks.on


# ------------------------------------------------------------------------------------------ parts


def test_the_main_optimizer_has_the_most_parameters() -> None:
    def optimizer(size: int) -> Any:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(size))], lr=1.0)

    small, large, late = optimizer(3), optimizer(5), optimizer(1)
    choice = MainOptimizer()
    turns = [choice.stepped(one) for one in (small, large) * 3]
    assert turns == [False, False, False, True, False, True]
    assert (choice.main, choice.count) == (large, 3)
    assert sum(choice.stepped(late) for _ in range(200)) > 100  # the program has gone on to another part


def test_losses_of_scaled_and_of_several_backward_calls(watched: Watched) -> None:
    losses = watched.watch._losses
    weight = torch.ones(1, requires_grad=True)
    for divisor, expected in ((1, 3.0), (2, 3.0)):
        for value in (2.0, 4.0):
            ((weight * value).sum() / divisor if divisor > 1 else (weight * value).sum()).backward()
        losses.end_optimizer()
        assert losses.take().value() == expected
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((weight * 7).sum()).backward()
    losses.end_optimizer()
    assert losses.take().value() == 7.0


def test_losses_of_backward_calls_without_a_tensor_method(watched: Watched) -> None:
    losses = watched.watch._losses
    weight = torch.ones(1, requires_grad=True)
    torch.autograd.backward((weight * 3).sum())
    torch.autograd.backward([(weight * 5).sum()])
    torch.autograd.backward([weight * 100, weight * 200])  # not a loss
    torch.autograd.backward(tensors=(weight * 7).sum())
    losses.end_optimizer()
    assert losses.take().value() == 5.0
    checkpointed = torch.utils.checkpoint.checkpoint(lambda x: x * 2, weight, use_reentrant=True)
    checkpointed.sum().backward()  # computes gradients inside the backward pass
    losses.end_optimizer()
    assert losses.take().value() == 2.0


@pytest.mark.parametrize("name", ["ScheduleGPipe", "ScheduleInterleavedZeroBubble"])
def test_the_loss_of_a_pipeline_is_the_mean_over_its_micro_batches(watched: Watched, name: str) -> None:
    import torch.distributed as dist
    from torch.distributed import pipelining

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(4, 4)
        stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule = getattr(pipelining, name)(
            stage if name == "ScheduleGPipe" else [stage],
            4,
            loss_fn=lambda output, target: (output - target).square().mean(),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = []
        for _ in range(60):
            losses: list[Any] = []
            schedule.step(torch.ones(8, 4), target=torch.zeros(8, 4), losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            expected.append(torch.stack(losses).mean().item())
            time.sleep(0.002)
        steps = watched.of(Step)
        assert steps and [one.loss for one in steps] == pytest.approx(
            [expected[one.step - 1] for one in steps]
        )
        assert all(one.phases["backward"] > 0 for one in steps)
    finally:
        dist.destroy_process_group()


def test_a_phase_inside_another_counts_once() -> None:
    phases = Phases()
    phases.enter("optimizer")
    phases.enter("backward")
    time.sleep(0.01)
    phases.leave("backward")
    phases.leave("optimizer")
    taken = phases.take()
    assert taken["backward"] >= 10 > taken["optimizer"]


# ------------------------------------------------------------------------------------------ several ranks


class SharedStore(StoreRanks):
    """One rank's access to the key-value store `values`, which all ranks share. Each rank is a thread of this
    process."""

    def __init__(self, rank: int, world: int, values: dict[str, bytes], closing: threading.Event) -> None:
        self.rank, self.world, self._closing = rank, world, closing
        self._store = type(
            "Store",
            (),
            {
                "set": values.__setitem__,
                "delete_key": lambda key: values.pop(key, None),
                "check": lambda keys: all(key in values for key in keys),
                "multi_get": lambda keys: [values[key] for key in keys],
            },
        )


def report(step: int, vote: str | None = None) -> Report:
    return Report(step, 0.1, [], None, vote)


def test_ranks_start_together_and_decide_with_all_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    closing, values = threading.Event(), dict[str, bytes]()
    ranks = [SharedStore(rank, 2, values, closing) for rank in range(2)]
    rounds = [Rounds(one, lambda: (7, 0.1)) for one in ranks]
    for number, votes in enumerate(([None, None], ["", "no"])):
        for one, vote in zip(rounds, votes, strict=True):
            one.submit(number, report(20, vote))
        outcomes = [one.outcome() for one in rounds]
        assert outcomes[0] and outcomes[1] and outcomes[0][0] == outcomes[1][0]
    assert [one.start for one in rounds] == [17, 17]
    assert outcomes[0] and outcomes[0][0].votes == ["", "no"]
    monkeypatch.setattr("agents.wrap.rounds.LATE_S", 0.01)
    rounds[0].submit(2, report(40))  # the other rank does not come
    assert rounds[0].outcome() is None and rounds[0].failure == "the ranks do not step together"
    closing.set()
    for one in rounds:
        one.close()
    with pytest.raises(ClosedError):
        ranks[0].put("key", b"")


def test_short_steps_are_reported_in_part() -> None:
    def decided(step_s: float, ranks: Sequence[int] = range(2)) -> tuple[int, int]:
        decision = decide([Report(1, step_s, []) for _ in ranks])
        return decision.stride, decision.gap

    assert decided(0.5) == (1, 2)
    assert decided(0.01) == (5, 30)
    assert decided(0.1, range(1000)) == (1, 23)
    assert decided(1e-5) == (64, 512)


def test_a_program_that_steps_alone_is_reported_and_steered_to_its_end(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.wrap.rounds.RECORD_S", 0.005)
    monkeypatch.setattr("agents.wrap.rounds.ROUND_S", 0.02)
    training(60)
    watched.pending = Command(1, "one", {"lr_scale": 0.25}, None)
    training(60)
    assert [ack.state for ack in watched.of(Ack)] == ["applied"]
    assert len(watched.of(Step)) > 10


def test_a_save_of_the_program_is_a_checkpoint_and_a_closure_sees_its_own_rate(watched: Watched) -> None:
    phases = watched.watch._phases
    doing: list[str] = []

    class Noted:
        def __reduce__(self) -> Any:
            doing.append(phases.current[0])
            return (str, ())

    torch.save({"weights": Noted()}, io.BytesIO())
    torch.serialization.save(Noted(), io.BytesIO())
    assert doing == ["checkpoint", "checkpoint"] and phases.current[0] == ""

    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    watched.watch._rates.scale = 0.5
    seen: list[float] = []
    optimizer.step(lambda: seen.append(optimizer.param_groups[0]["lr"]))
    assert (seen, weight.item(), optimizer.param_groups[0]["lr"]) == ([0.5], -0.25, 0.5)
