"""Trials end despite errors: none is lost or runs forever, and an unreadable row in the journal does not affect
others."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from agents.hub.commands.confidence import compared
from agents.hub.commands.journal import Journal
from agents.hub.commands.trials import Trials
from agents.protocol import (
    Ack,
    Board,
    CommandState,
    Decide,
    Gone,
    KnobState,
    Legal,
    Propose,
    TrialState,
    Try,
    codec,
)
from agents.protocol.base import TEXT
from agents.state.run_state import COMMANDS, RunState
from agents.state.undo import newest_undoable
from agents.transport.roles import Role, refusal
from tests.unit.agents.control_harness import WORLD, ControlHarness
from tests.unit.agents.fleet import make_summary

ASK = Try("t", {"micro_batches": 8}, 4, "me")


class Bench(ControlHarness):
    """A `Control` (the part of a hub that handles commands) with one trial, and ranks that apply each command."""

    def start(self) -> None:
        super().start()
        self.trials = Trials(self.update_log, self.control, self.journal)
        self.step = 0

    def show(self, revision: int, value: int, legal: tuple[int, ...] = (2, 4, 8), lr: float = 0.1) -> None:
        knobs = [
            KnobState("micro_batches", value, Legal(list(legal)), True),
            KnobState("lr", lr, Legal(low=0.0, high=1.0), False),
        ]
        self.update_log.publish(Board(0, revision, "d", knobs))

    def run(self, value: int, steps: int = 8, ms: float = 100.0) -> None:
        for _ in range(steps):
            summary = make_summary(self.step)
            knobs = {"micro_batches": value, "lr": 0.1}
            self.update_log.publish(structs.replace(summary, knobs=knobs, step_ms=ms))
            self.step += 1

    def switch(self, value: int) -> None:
        """Apply the next command on all ranks."""
        self.trials.tick()
        self.settle()
        command = self.control.next_command(1e9 + self.step)
        assert command is not None
        for rank in range(WORLD):
            ack = Ack(rank, command.revision, "applied", self.step, "d", before={"micro_batches": 4})
            self.control.ack(ack)
        self.show(command.revision, value)
        self.trials.tick()
        self.settle()

    @property
    def trial(self) -> TrialState:
        return self.update_log.state.trials["t"]


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


def test_a_second_trial_is_refused_and_the_first_continues(bench: Bench) -> None:
    bench.trials.start(ASK)
    bench.trials.start(Try("u", {"lr": 0.5}, 4, "you"))
    assert bench.update_log.state.trials["u"].why == "another trial is running, by me"
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
def test_a_long_name_breaks_neither_the_run_nor_the_journal(bench: Bench, stage: str, keep: bool) -> None:
    long = "w" * TEXT
    if stage == "after":
        _tried(bench)
    else:
        bench.trials.start(structs.replace(ASK, who=long))
        bench.trials.start(structs.replace(ASK, id="u"))
    bench.trials.decide(Decide(keep, "t", long))
    for frame in bench.update_log.snapshot():
        codec.decode(frame)
    bench.restart()
    assert bench.journal.failure == "" and "t" in bench.update_log.state.trials


def test_an_illegal_revert_is_given_up_and_reported(bench: Bench) -> None:
    _tried(bench)
    bench.show(2, 8, legal=(8,))
    bench.trials.decide(Decide(False, "t", "me"))
    for _ in range(6):
        bench.settle()
        bench.trials.tick()
    assert bench.trial.state == "failed" and "micro_batches = 4 is not legal" in bench.trial.why
    assert [id for id in bench.update_log.state.commands if "revert" in id] == ["t.revert1"]
    assert any("could not be reverted; micro_batches=8 stays" in text for text in bench.errors)


def test_a_revert_waits_for_ranks_under_one_id(bench: Bench) -> None:
    _tried(bench)
    bench.membership.newly_lost(1e6)
    bench.trials.decide(Decide(False, "t", "me"))
    for _ in range(4):
        bench.settle()
        bench.trials.tick()
    assert bench.trial.state == "reverting" and not bench.control.under_way
    bench.train(1)
    bench.show(1, 8)
    bench.switch(4)
    states = [trial.state for trial in bench.update_log.state.trials.values()]
    assert states == ["reverted"] and "t.revert1" in bench.update_log.state.commands


def test_times_that_cannot_be_compared_do_not_end_the_hub(bench: Bench) -> None:
    assert compared([1e-200] * 3 + [2e-200], [1e200] * 3 + [1.1e200]) is None
    bench.trials.start(ASK)
    bench.run(4, ms=1e-200)
    bench.switch(8)
    bench.run(8, steps=4, ms=1e200)
    bench.run(8, steps=4, ms=2e200)
    bench.trials.tick()
    bench.settle()
    assert bench.trial.state == "reverting" and "cannot be compared" in bench.trial.why


def test_an_error_in_a_trial_ends_only_that_trial(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    _tried(bench)

    def wrong(*_: object) -> None:
        raise ArithmeticError("oh")

    monkeypatch.setattr("agents.hub.commands.trial_rules.compared", wrong)
    bench.run(8)
    bench.switch(4)
    assert bench.trial.state == "reverted" and bench.errors == [
        "trial t cannot continue: ArithmeticError: oh"
    ]


def test_unreadable_rows_do_not_affect_others(bench: Bench) -> None:
    bench.propose("good", {"lr": 0.5})
    bench.propose("bad", {"lr": 0.6})
    bench.trials.start(ASK)
    bench.journal.close()
    with sqlite3.connect(bench.path) as db:
        db.execute("UPDATE commands SET why = ? WHERE id = 'bad'", ("w" * (TEXT + 1),))
        db.execute("INSERT INTO trials VALUES ('x', 1.0, ?, NULL)", (json.dumps({"state": ["trialstate"]}),))
    journal = Journal(bench.path)
    found = journal.found
    assert (journal.failure, found.last_revision) == ("", 2)
    assert found.problems == ["rows of the journal that cannot be read and are left out: 2"]
    assert [entry.state.id for entry in found.entries] == ["good"]
    assert [entry.state.id for entry in found.trials] == ["t"]
    journal.close()
    bench.start()
    bench.train()
    bench.show(0, 4)
    assert "cannot be read" in bench.propose("bad", {"lr": 0.6}).why


def test_an_undecodable_update_is_never_published(bench: Bench) -> None:
    bench.update_log.publish(Gone(1, clean=False, text="w" * (TEXT + 1)))
    for frame in bench.update_log.snapshot():
        codec.decode(frame)
    assert not bench.update_log.state.gone and "an unreadable gone is omitted" in bench.errors[0]


def test_refusals_do_not_displace_undoable_changes() -> None:
    state = RunState()
    good = CommandState("good", 1, "applied", {"lr": 1}, {"lr": 2}, "me", 0.0)
    state.apply(good)
    for number in range(COMMANDS + 10):
        state.apply(CommandState(f"no{number}", 0, "rejected", {"lr": 3}, {}, "you", 0.0))
    assert newest_undoable(state.commands.values()) is good and len(state.commands) == COMMANDS
    assert f"no{COMMANDS + 9}" in state.commands and "no0" not in state.commands


def test_a_refused_trial_does_not_displace_the_running_one(bench: Bench) -> None:
    bench.trials.start(ASK)
    for number in range(100):
        bench.trials.start(Try(f"u{number}", {"lr": 0.5}, 4, "you"))
    assert bench.trial.state == "before"
    bench.restart()
    assert bench.trial.state == "before" and len(bench.update_log.state.trials) == 1


@pytest.mark.parametrize("name", ["t.try", "t.revert1"])
def test_ids_of_a_trials_proposals_are_reserved(name: str) -> None:
    assert "use another id" in (refusal(Role.OPERATOR, "", Propose(name, {"lr": 1})) or "")
    assert refusal(Role.OPERATOR, "", Propose("t.tryout", {"lr": 1})) is None


# --------------------------------------------------------------------------------------- which decision counts


def test_only_the_leader_can_reject_a_command(bench: Bench) -> None:
    bench.propose("a", {"micro_batches": 8})
    no = Ack(2, 1, "rejected", 5, "x", "nope")
    bench.control.ack(no)
    assert bench.control.next_command(0.0) is not None
    bench.control.ack(no)
    assert bench.update_log.state.commands["a"].state == "accepted"
    bench.ack(1, 0, 1)
    command = bench.update_log.state.commands["a"]
    assert (command.state, command.acks) == ("applied", 2)
    assert bench.errors == ["rank 2 reports rejected for revision 1, other ranks applied: nope"]


def test_an_ack_of_an_unsent_command_does_not_count(bench: Bench) -> None:
    bench.propose("a", {"micro_batches": 8})
    bench.propose("b", {"micro_batches": 2})
    bench.control.next_command(0.0)
    bench.control.ack(Ack(0, 2, "applied", 5, "x"))
    assert bench.update_log.state.commands["b"].state == "accepted"


def test_refusals_do_not_fill_the_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.hub.commands.journal_file.REFUSED_KEPT", 5)
    monkeypatch.setattr("agents.hub.commands.journal_file.PRUNE_PERIOD", 10)
    bench.propose("good", {"lr": 0.5})
    for number in range(40):
        bench.propose(f"no{number}", {"nothing": 1})
    bench.journal.flush()
    with sqlite3.connect(bench.path) as db:
        refused, good = (
            db.execute(f"SELECT COUNT(*) FROM commands WHERE revision {than} 0").fetchone()[0]
            for than in ("=", ">")
        )
    assert refused < 20 and good == 1
