"""Pause, resume, stop and profile, in a run with one rank in this process."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from agents.protocol import PAUSED, Ack, Changes, Command, Event, Summary
from engine.config.grid import Grid
from engine.config.toml import load
from engine.control.profiler import slices
from engine.metering.meter import Meter
from engine.rendezvous import single_rank_context
from engine.train.trainer import Trainer
from tests.ranks.cases.case import SMALL
from tests.unit.engine.config.test_layout import DEMO
from tests.unit.engine.train.test_trainer import SilentAgent


class ScriptedAgent(SilentAgent):
    """An agent that proposes one command at each step boundary and collects the acks."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.acks: list[Ack] = []
        self.operations: list[str] = []
        self._meter = meter
        self._proposals: deque[Command] = deque()  # type: ignore[assignment]
        self.launcher_stops: Callable[[], bool] = lambda: False

    def propose(self, *changes: Changes) -> None:
        self._proposals += [Command(n, f"c{n}", one) for n, one in enumerate(changes, 1)]  # type: ignore[operator]

    @property
    def pending(self) -> Command | None:
        self.operations.append(self._meter.operation[1])
        return self._proposals[0] if self._proposals else None  # type: ignore[index]

    def settle(self, ack: Ack) -> None:
        if self._proposals and self._proposals[0].revision == ack.revision:  # type: ignore[index]
            self._proposals.popleft()  # type: ignore[attr-defined]
        if ack.state != "agreed":
            self.acks.append(ack)

    @property
    def steps(self) -> list[int]:
        return [message.step for message in self.messages if isinstance(message, Summary)]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    dist.init_process_group("gloo", store=single_rank_context(tmp_path).store(), rank=0, world_size=1)
    meter = Meter(2, 8)
    layout = load(DEMO, [*SMALL, "train.steps=30"])
    agent = ScriptedAgent(meter)
    yield Trainer(
        layout,
        meter,
        agent,
        lambda: agent.launcher_stops(),
        traces=tmp_path / "profile",
        checkpoints_dir=tmp_path / "checkpoints",
    )
    dist.destroy_process_group()


def test_a_paused_run_accepts_commands_resumes_and_stops(trainer: Trainer) -> None:
    agent = trainer.agent
    assert isinstance(agent, ScriptedAgent)
    agent.propose({"pause": True}, {"lr_scale": 0.5}, {"save": True}, {"resume": True}, {"stop": True})
    trainer.run()
    # The ack of a save is sent when the checkpoint is on disk.
    acks = sorted(agent.acks, key=lambda ack: ack.revision)
    assert [(ack.state, ack.step) for ack in acks] == [("applied", 1)] * 4 + [("applied", 2)]
    assert agent.steps == [0, 1], "stopped after the step with the proposal"
    assert PAUSED in agent.operations and trainer.knob_values.lr_scale == 0.5
    saved = [
        message.text
        for message in agent.messages
        if isinstance(message, Event) and "checkpoint" in message.text
    ]
    assert len(saved) == 1 and saved[0].startswith("checkpoint of step 1:")


def test_a_paused_run_can_be_stopped(trainer: Trainer) -> None:
    agent = trainer.agent
    assert isinstance(agent, ScriptedAgent)
    agent.propose({"pause": True}, {"stop": True})
    trainer.run()
    assert agent.steps == [0]


def test_a_paused_run_stops_at_the_launchers_request(trainer: Trainer) -> None:
    agent = trainer.agent
    assert isinstance(agent, ScriptedAgent)
    agent.propose({"pause": True})
    agent.launcher_stops = lambda: trainer.steering.run_actions.paused
    trainer.run()
    assert agent.steps == [0]


def test_a_profile_is_a_trace_of_those_steps(trainer: Trainer, tmp_path: Path) -> None:
    agent = trainer.agent
    assert isinstance(agent, ScriptedAgent)
    agent.propose({"profile": 2}, {"lr_scale": 0.9}, {"lr_scale": 0.8}, {"stop": True})
    trainer.run()
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "step000001-rank0.json"
    trace = json.loads(path.read_text())
    assert trace["cockpit"] == {"rank": 0, "coords": {"pp": 0, "dp": 0, "tp": 0}}
    events = trace["traceEvents"]
    steps = [event["name"] for event in events if event.get("name", "").startswith("step ")]
    assert steps == ["step 1", "step 2"]
    assert sum(event.get("name") == "aten::embedding" for event in events) >= 2
    messages = [
        message.text for message in agent.messages if isinstance(message, Event) and "trace" in message.text
    ]
    assert messages == [f"trace of steps 1 to 2: {path}"]


def test_a_trace_that_the_end_of_the_run_cuts_short_names_its_last_step(
    trainer: Trainer, tmp_path: Path
) -> None:
    agent = trainer.agent
    assert isinstance(agent, ScriptedAgent)
    agent.propose({"profile": 5}, {"lr_scale": 0.9}, {"lr_scale": 0.8}, {"stop": True})
    trainer.run()
    (path,) = (tmp_path / "profile").iterdir()
    messages = [
        message.text for message in agent.messages if isinstance(message, Event) and "trace" in message.text
    ]
    events = json.loads(path.read_text())["traceEvents"]
    steps = [event["name"] for event in events if event.get("name", "").startswith("step ")]
    assert len(steps) > 1 and messages == [f"trace of steps 1 to {steps[-1].removeprefix('step ')}: {path}"]


def test_a_profile_of_later_steps(trainer: Trainer, tmp_path: Path) -> None:
    agent = trainer.agent
    assert isinstance(agent, ScriptedAgent)
    agent.propose(
        {"profile": 1, "profile_from": 3, "profile_rank": "all"}, *[{"lr_scale": 0.5}] * 4, {"stop": True}
    )
    trainer.run()
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "step000003-rank0.json"
    with pytest.raises(ValueError, match="profile_from = 2 has passed; the next step is"):
        trainer.board.prepare({"profile": 1, "profile_from": 2})


def test_ranks_at_each_coordinate() -> None:
    assert slices(Grid(pp=2, tp=2)) == {
        "pp0": {0, 1},
        "pp1": {2, 3},
        "tp0": {0, 2},
        "tp1": {1, 3},
    }


def test_no_trace_starts_or_ends_during_a_gather(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three profiler traces: the first ends after its steps, the second ends early because the third starts, and the
    third ends with the run."""
    agent, summaries, log, under_way = trainer.agent, trainer.reporting.summaries, list[str](), list[bool]()
    assert isinstance(agent, ScriptedAgent)
    gather, collect = summaries.gather, summaries.collect

    def gathering(*measured: Any) -> None:
        under_way.append(True)
        gather(*measured)

    def collected() -> Any:
        under_way.append(False)
        return collect()

    monkeypatch.setattr(summaries, "gather", gathering)
    monkeypatch.setattr(summaries, "collect", collected)

    class Profile:
        """Replaces torch's profiler; logs at each start and stop whether the gather of the ranks' measurements is
        running."""

        def __init__(self, **_: object) -> None:
            pass

        def start(self) -> None:
            log.append(f"start {under_way[-1]}")

        def stop(self) -> None:
            log.append(f"stop {under_way[-1]}")

        def add_metadata_json(self, _: str, __: str) -> None:
            pass

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text("{}")

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    agent.propose({"profile": 1}, {"profile": 10}, {"profile": 5}, {"stop": True})
    trainer.run()
    assert log == ["start False", "stop False"] * 3 and True in under_way


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"profile_rank": 0}, "profile_rank has an effect only together with profile"),
        ({"profile_from": 3}, "profile_from has an effect only together with profile"),
        ({"profile": 2, "profile_rank": 7}, "profile_rank = 7 is not legal; legal: all, 0 to 0"),
        ({"profile": 2, "profile_from": 1.5}, "profile_from = 1.5 is not a whole number"),
        ({"profile": 4}, "profile = 4 is not legal; legal: 1, 2, 3, 5, 10, 20, 50"),
        ({"pause": False}, "pause = false is not legal; legal: true"),
    ],
)
def test_refused(trainer: Trainer, changes: Changes, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("(", r"\(")):
        trainer.board.prepare(changes)


def test_the_validation_loss_is_that_of_the_knobs_of_its_step(tmp_path: Path) -> None:
    """A capacity that the ranks agree on at the end of step 1 drops tokens from step 2 on. The validation loss of step
    1, which is measured after the agreement, is still that of a run without the change."""
    found = []
    for changes in ((), ({"capacity_factor": 0.25},)):
        dist.init_process_group("gloo", store=single_rank_context(tmp_path).store(), rank=0, world_size=1)
        validated = ["validation.every=1", "validation.source=stdlib", "validation.sequences=8"]
        meter = Meter(2, 8)
        agent = ScriptedAgent(meter)
        trainer = Trainer(load(DEMO, [*SMALL, "train.steps=3", *validated]), meter, agent)
        trainer.train_step(0)
        agent.propose(*changes)
        for step in (1, 2):
            trainer.train_step(step)
        trainer.close()
        dist.destroy_process_group()
        found.append([message for message in agent.messages if isinstance(message, Summary)])
    plain, changed = found
    assert [summary.knobs["capacity_factor"] for summary in changed] == [None, None, 0.25]
    assert [a.validation_loss == b.validation_loss for a, b in zip(plain, changed, strict=True)] == [
        True,
        True,
        False,
    ]
