"""What must not become of a trial: forgotten, told in words that nobody can read, or tried for ever."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from agents import codec
from agents.intervals import compared
from agents.journal import Journal
from agents.terms import TEXT
from agents.trials import Trials
from agents.wire import Ack, Board, Decide, KnobState, Legal, TrialState, Try
from tests.unit.agents.fleet import make_summary
from tests.unit.agents.test_control import WORLD, Desk

ASK = Try("t", {"micro_batches": 8}, 4, "me")


class Bench(Desk):
    """A desk with one trial, and ranks that do what they are told."""

    def start(self) -> None:
        super().start()
        self.trials = Trials(self.sequence, self.control, self.journal)
        self.step = 0

    def show(self, revision: int, value: int, legal: tuple[int, ...] = (2, 4, 8), lr: float = 0.1) -> None:
        knobs = [
            KnobState("micro_batches", value, Legal(list(legal)), True),
            KnobState("lr", lr, Legal(low=0.0, high=1.0), False),
        ]
        self.sequence.publish(Board(0, revision, "d", knobs))

    def run(self, value: int, steps: int = 8, ms: float = 100.0) -> None:
        for _ in range(steps):
            summary = make_summary(self.step)
            knobs = {"micro_batches": value, "lr": 0.1}
            self.sequence.publish(structs.replace(summary, knobs=knobs, step_ms=ms))
            self.step += 1

    def switch(self, value: int) -> None:
        """The ranks carry out what waits for them."""
        self.trials.tick()
        self.settle()
        command = self.control.due(1e9 + self.step)
        assert command is not None
        for rank in range(WORLD):
            ack = Ack(rank, command.revision, "applied", self.step, "d", before={"micro_batches": 4})
            self.control.ack(ack)
        self.show(command.revision, value)
        self.trials.tick()
        self.settle()

    @property
    def trial(self) -> TrialState:
        return self.sequence.state.trials["t"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "run.db")
    bench.train()
    bench.show(0, 4)
    yield bench
    bench.journal.close()


def _tried(bench: Bench) -> None:
    bench.trials.start(ASK)
    bench.run(4)
    bench.switch(8)
    assert bench.trial.state == "after"


def test_a_second_trial_is_refused_and_the_first_goes_on(bench: Bench) -> None:
    bench.trials.start(ASK)
    bench.trials.start(Try("u", {"lr": 0.5}, 4, "you"))
    assert bench.sequence.state.trials["u"].why == "another trial is under way, by me"
    bench.run(4)
    bench.switch(8)
    bench.trials.start(Try("v", {"lr": 0.5}, 4, "you"))
    bench.trials.decide(Decide(False, "t", "me"))
    bench.switch(4)
    assert (bench.trial.state, bench.control.revision) == ("reverted", 2)


def test_a_decision_waits_while_another_trial_is_refused(bench: Bench) -> None:
    bench.trials.start(ASK)
    bench.run(4)
    bench.trials.tick()
    bench.trials.decide(Decide(True, "t", "me"))
    bench.trials.start(Try("u", {"lr": 0.5}, 4, "you"))
    bench.switch(8)
    assert (bench.trial.state, bench.trial.why) == ("kept", "kept by me")


@pytest.mark.parametrize("stage", ["before", "after"])
@pytest.mark.parametrize("keep", [True, False])
def test_a_long_name_costs_nobody_the_run_or_the_journal(bench: Bench, stage: str, keep: bool) -> None:
    long = "w" * TEXT
    if stage == "after":
        _tried(bench)
    else:
        bench.trials.start(structs.replace(ASK, who=long))
        bench.trials.start(structs.replace(ASK, id="u"))
    bench.trials.decide(Decide(keep, "t", long))
    for frame in bench.sequence.snapshot():
        codec.decode(frame)
    bench.restart()
    assert bench.journal.failure == "" and "t" in bench.sequence.state.trials


def test_a_revert_that_is_not_legal_is_given_up_and_told(bench: Bench) -> None:
    _tried(bench)
    bench.show(2, 8, legal=(8,))
    bench.trials.decide(Decide(False, "t", "me"))
    for _ in range(6):
        bench.settle()
        bench.trials.tick()
    assert bench.trial.state == "failed" and "micro_batches = 4 is not legal" in bench.trial.why
    assert [id for id in bench.sequence.state.commands if "revert" in id] == ["t.revert1"]
    assert any("could not be taken back, micro_batches=8 stays" in text for text in bench.errors)


def test_a_revert_waits_for_ranks_under_one_name(bench: Bench) -> None:
    _tried(bench)
    bench.roster.newly_lost(1e6)
    bench.trials.decide(Decide(False, "t", "me"))
    for _ in range(4):
        bench.settle()
        bench.trials.tick()
    assert bench.trial.state == "reverting" and not bench.control.under_way
    bench.train(1)
    bench.show(1, 8)
    bench.switch(4)
    assert bench.trial.state == "reverted" and "t.revert1" in bench.sequence.state.commands


def test_times_that_cannot_be_compared_do_not_end_the_hub(bench: Bench) -> None:
    assert compared([1e-200] * 3 + [2e-200], [1e200] * 3 + [1.1e200]) is None
    bench.trials.start(ASK)
    bench.run(4, ms=1e-200)
    bench.switch(8)
    bench.run(8, steps=4, ms=1e200)
    bench.run(8, steps=4, ms=2e200)
    bench.trials.tick()
    bench.settle()
    assert bench.trial.state == "reverting" and "does not compare" in bench.trial.why


def test_a_mistake_in_a_trial_costs_that_trial(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    _tried(bench)

    def wrong(*_: object) -> None:
        raise ArithmeticError("oh")

    monkeypatch.setattr("agents.trials.compared", wrong)
    bench.run(8)
    bench.switch(4)
    assert bench.trial.state == "reverted" and bench.errors == ["trial t cannot go on: ArithmeticError: oh"]
