"""Trials with a real journal but no sockets. The tests set the duration of each step."""

import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
from msgspec import structs

from agents.hub.commands.trial_window import Window
from agents.hub.commands.trials import APPLY_TIMES, LEAST_S, Trials
from agents.protocol import Ack, Board, Decide, KnobState, Legal, Summary, TrialState, Try
from agents.rank.knob_board import Values
from agents.state.run_state import HISTORY
from tests.unit.agents.control_harness import WORLD, ControlHarness
from tests.unit.agents.fleet import make_summary

NOISE = cycle((0.0, 0.3, -0.2, 0.1, -0.3, 0.2))

STEPS = 12


class Lab(ControlHarness):
    """A `Control` (the part of a hub that handles commands) with trials, and ranks that apply each command."""

    def start(self) -> None:
        super().start()
        self.trials = Trials(self.update_log, self.control, self.journal)

    def begin(self) -> None:
        self.values: dict[str, object] = {"micro_batches": 4, "lr": 0.1}
        self.step, self.board_revision = 0, 0
        self.train()
        self.show()

    def show(self) -> None:
        knobs = [
            KnobState("micro_batches", self.values["micro_batches"], Legal([1, 2, 4, 8]), True),  # type: ignore[arg-type]
            KnobState("lr", self.values["lr"], Legal(low=0.0, high=1.0), False),  # type: ignore[arg-type]
            KnobState("save", None, Legal([True]), True, action=True),
        ]
        self.update_log.publish(Board(0, self.board_revision, "d", knobs))

    def run(self, steps: int, ms: dict[object, float] | None = None, knob: str = "micro_batches") -> None:
        """Run some training steps, and apply commands between them. A step takes `ms[value]` for the current value of
        `knob`, or 100 ms if `ms` has no entry for this value, plus noise.
        """
        for _ in range(steps):
            took = (ms or {}).get(self.values[knob], 100.0) + next(NOISE)
            self.update_log.publish(
                structs.replace(make_summary(self.step), knobs=dict(self.values), step_ms=took)
            )
            self.step += 1
            self.trials.tick()
            self.obey()

    def obey(self) -> None:
        self.settle()
        while command := self.control.next_command(float(self.step)):
            before: Values = {n: self.values[n] for n in command.changes if n in self.values}  # type: ignore[misc]
            self.values |= {n: v for n, v in command.changes.items() if n in self.values}
            self.board_revision = command.revision
            self.show()
            for rank in range(WORLD):
                self.control.ack(Ack(rank, command.revision, "applied", self.step, "d", before=dict(before)))
            self.control.publish_acks()
            self.trials.tick()
            self.settle()

    @property
    def trial(self) -> TrialState:
        return self.update_log.state.trials["t"]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path / "run.db")
    lab.begin()
    yield lab
    lab.journal.close()


EIGHT = Try("t", {"micro_batches": 8}, STEPS, "me", "why not")


def test_clearly_faster_is_kept(lab: Lab) -> None:
    lab.trials.start(EIGHT)
    lab.run(40, {8: 90.0})
    trial = lab.trial
    assert (trial.state, lab.values["micro_batches"]) == ("kept", 8)
    assert trial.ratio and trial.low and trial.high
    assert trial.low < 0.9 < trial.high < 0.95 and abs(trial.ratio - 0.9) < 0.01
    assert trial.before == {"micro_batches": 4} and trial.revision == 1
    assert lab.update_log.state.commands["t.try"].reason == "trial t"


TWO = Try("t", {"micro_batches": 8, "lr": 0.2}, STEPS, "me")


def test_two_knobs_are_tried_and_reverted_together(lab: Lab) -> None:
    lab.trials.start(TWO)
    lab.run(STEPS + 4, {8: 90.0})
    assert lab.trial.state == "after" and lab.values == {"micro_batches": 8, "lr": 0.2}
    assert not lab.trial.loss_neutral, "one of the knobs changes the loss"
    lab.run(40, {8: 90.0})
    assert lab.trial.state == "reverted" and lab.values == {"micro_batches": 4, "lr": 0.1}


def test_an_operators_change_of_one_tried_knob_reverts_only_the_other(lab: Lab) -> None:
    lab.trials.start(TWO)
    lab.run(STEPS + 4)
    assert lab.trial.state == "after"
    lab.propose("p", {"lr": 0.3})
    lab.run(4)
    assert lab.trial.state == "reverted" and lab.trial.why.startswith("lr was changed by an operator")
    assert lab.values == {"micro_batches": 4, "lr": 0.3}


def test_a_trial_longer_than_the_kept_summaries_ends(lab: Lab) -> None:
    steps = 2 * HISTORY
    lab.trials.start(structs.replace(EIGHT, steps=steps))
    lab.run(2 * steps + 10, {8: 90.0})
    assert (lab.trial.state, lab.trial.measured) == ("kept", steps)
    assert len(lab.update_log.state.summaries) == HISTORY


@pytest.mark.parametrize("every", [1, 10])
def test_a_window_restarts_after_a_gap(lab: Lab, every: int) -> None:
    def run(steps: int) -> None:
        for _ in range(steps):
            lab.run(1)
            lab.step += every - 1

    lab.trials.start(EIGHT)
    run(STEPS)
    assert lab.trial.state == "before"
    lab.step += every  # one summary is lost
    run(STEPS + 1)
    assert (lab.trial.state, lab.trial.measured) == ("before", STEPS - 1)
    run(1)
    assert lab.trial.state in ("applying", "after")


@pytest.mark.parametrize("apart", [(1, 2), (5, 7, 5, 13), (1, 1, 10)])
def test_a_trial_of_a_loop_with_uneven_step_numbers_ends(lab: Lab, apart: tuple[int, ...]) -> None:
    lab.trials.start(EIGHT)
    for _, distance in zip(range(4 * STEPS), cycle(apart), strict=False):
        lab.run(1, {8: 90.0})
        lab.step += distance - 1
    assert (lab.trial.state, lab.trial.measured) == ("kept", STEPS)


def wait(lab: Lab, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the time pass in which the run makes no step."""
    began = time.monotonic()
    for second in range(int(seconds)):
        monkeypatch.setattr("agents.hub.commands.trials.time.monotonic", lambda at=began + second: at)
        lab.trials.tick()
        lab.obey()


def test_a_trial_of_a_run_that_makes_no_steps_ends(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.trials.start(EIGHT)
    lab.run(STEPS - 6)
    wait(lab, monkeypatch, LEAST_S - 2)
    assert lab.trial.state == "before"
    wait(lab, monkeypatch, 10)
    assert (lab.trial.state, lab.trial.why) == (
        "failed",
        f"only {STEPS - 8} of {STEPS} steps could be measured in a row within 600 s",
    )
    lab.trials.start(structs.replace(EIGHT, id="u"))
    lab.run(STEPS + 6)
    assert (trials := lab.update_log.state.trials)["u"].state == "after"
    wait(lab, monkeypatch, LEAST_S + 5)
    assert trials["u"].state == "reverted" and "steps could be measured in a row" in trials["u"].why
    assert lab.values["micro_batches"] == 4


def test_a_slow_run_has_time_for_its_trial(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.trials.start(EIGHT)
    lab.run(2, {4: 60_000.0})
    wait(lab, monkeypatch, 4 * STEPS * 60 - 2)
    assert lab.trial.state == "before"
    wait(lab, monkeypatch, 10)
    assert lab.trial.state == "failed"


def test_a_change_that_waits_too_long_expires(lab: Lab) -> None:
    lab.trials.start(EIGHT)
    for _ in range(STEPS + 2):
        lab.update_log.publish(structs.replace(make_summary(lab.step), knobs=dict(lab.values)))
        lab.step += 1
    lab.trials.tick()
    lab.settle()
    command = lab.control.next_command(0.0)
    assert command and command.expires_step == lab.step - 1 + APPLY_TIMES * STEPS


def test_a_window_restarts_after_recalled_or_repeated_steps() -> None:
    def told(*steps: int) -> list[Summary]:
        return [structs.replace(make_summary(step), knobs={"k": 1}) for step in steps]

    window, past, now = Window(), told(*range(10)), told(10, 11, 12, 13)
    assert [one.step for one in window.follow(now, {"k": 1})] == [12, 13]
    assert len(window.follow([*past, *now], {"k": 1})) == 12, "a hub that was started again has learned them"
    anew = told(5, 6)
    assert [one.step for one in window.follow([*past[:5], *anew], {"k": 1})] == [2, 3, 4, 5, 6]
    assert window.follow([*past[:5], *anew], {"k": 2}) == []


@pytest.mark.parametrize("ms", [100.0, 110.0])
def test_not_clearly_faster_is_reverted(lab: Lab, ms: float) -> None:
    lab.trials.start(EIGHT)
    lab.run(40, {8: ms})
    assert (lab.trial.state, lab.trial.why) == ("reverted", "it is not clearly faster")
    assert lab.values["micro_batches"] == 4
    back = lab.update_log.state.commands["t.revert1"]
    assert (back.undoes, back.state) == (1, "applied")


def test_the_first_steps_after_a_switch_do_not_count(lab: Lab) -> None:
    lab.trials.start(EIGHT)
    lab.run(14)
    assert lab.trial.state == "after"
    for _ in range(2):  # the first steps after the change are slow
        lab.run(1, {8: 5000.0})
    lab.run(16, {8: 90.0})
    assert lab.trial.state == "kept" and lab.trial.after_ms and lab.trial.after_ms < 95


def test_a_knob_that_changes_the_loss_is_never_kept_by_step_time(lab: Lab) -> None:
    lab.trials.start(Try("t", {"lr": 0.5}, STEPS))
    lab.run(40, {0.5: 50.0}, "lr")
    assert lab.trial.state == "reverted" and "changes the loss" in lab.trial.why
    assert lab.trial.high and lab.trial.high < 0.6
    assert lab.values["lr"] == 0.1


@pytest.mark.parametrize(("keep", "state", "value"), [(True, "kept", 8), (False, "reverted", 4)])
def test_ended_by_hand(lab: Lab, keep: bool, state: str, value: int) -> None:
    lab.trials.start(EIGHT)
    lab.run(18)
    lab.trials.decide(Decide(keep, "t", "you"))
    lab.run(2)
    assert (lab.trial.state, lab.values["micro_batches"]) == (state, value)
    assert "by you" in lab.trial.why


def test_ended_before_anything_was_changed(lab: Lab) -> None:
    lab.trials.start(EIGHT)
    lab.run(3)
    lab.trials.decide(Decide(False, "", "you"))
    assert lab.trial.state == "reverted" and "t.try" not in lab.update_log.state.commands


def test_another_change_ends_the_trial(lab: Lab) -> None:
    lab.trials.start(EIGHT)
    lab.run(18)
    lab.propose("other", {"lr": 0.3})
    lab.run(20, {8: 50.0})
    assert lab.trial.state == "reverted" and "another knob was changed" in lab.trial.why
    assert lab.values == {"micro_batches": 4, "lr": 0.3}


def test_an_operators_change_of_the_tried_knob_wins(lab: Lab) -> None:
    lab.trials.start(EIGHT)
    lab.run(18)
    lab.propose("other", {"micro_batches": 2})
    lab.run(20)
    assert lab.trial.state == "failed" and lab.values["micro_batches"] == 2


@pytest.mark.parametrize("steps", [5, 15, 20], ids=["before", "just applied", "after"])
def test_a_restarted_hub_continues_the_trial(lab: Lab, steps: int) -> None:
    lab.trials.start(EIGHT)
    lab.run(steps)
    lab.restart()
    lab.train(lab.board_revision)
    lab.show()
    lab.run(45, {8: 90.0})
    assert (lab.trial.state, lab.values["micro_batches"]) == ("kept", 8)
    assert lab.board_revision == 1, "tried once"


def test_a_due_revert_waits_for_absent_ranks(lab: Lab) -> None:
    lab.trials.start(EIGHT)
    lab.run(20)
    lab.membership.newly_lost(100.0)
    lab.trials.decide(Decide(False, "t", "you"))
    lab.settle()
    lab.trials.tick()
    assert lab.trial.state == "reverting" and lab.values["micro_batches"] == 8
    back = lab.membership.connection(bytes([0]))
    assert back and back.ranks[0].mark_heard(101.0)
    lab.run(4)
    assert (lab.trial.state, lab.values["micro_batches"]) == ("reverted", 4)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mb": 1}, "there is no knob mb"),
        ({"save": True}, "save is an action"),
        ({"micro_batches": 4}, "already has this value"),
        ({"micro_batches": 3}, "micro_batches = 3 is not legal"),
        ({"micro_batches": 8, "mb": 1}, "there is no knob mb"),
        ({}, "a trial changes at least one knob"),
    ],
)
def test_refused(lab: Lab, changes: dict[str, object], why: str) -> None:
    lab.trials.start(Try("t", changes, STEPS))  # type: ignore[arg-type]
    assert lab.trial.state == "failed" and why in lab.trial.why


def test_one_trial_at_a_time_and_a_repeated_id_starts_one(lab: Lab) -> None:
    lab.trials.start(EIGHT)
    lab.trials.start(EIGHT)
    lab.trials.start(structs.replace(EIGHT, id="u"))
    assert lab.trial.state == "before"
    assert lab.update_log.state.trials["u"].why == "another trial is running, by me"


# ------------------------------------------------------------------------------------------- undo and statistics


def test_undo_goes_back_change_by_change(lab: Lab) -> None:
    for id, changes in (
        ("a", {"micro_batches": 8}),
        ("b", {"lr": 0.2, "micro_batches": 2}),
        ("c", {"save": True}),
    ):
        lab.propose(id, changes)  # type: ignore[arg-type]
        lab.obey()

    def undo(id: str) -> dict[str, object]:
        from agents.protocol import Propose

        lab.control.propose(Propose(id, {}, undo=True))
        lab.settle()
        lab.obey()
        return lab.values

    assert undo("u1") == {"micro_batches": 8, "lr": 0.1}
    assert lab.update_log.state.commands["u1"].undoes == 2
    assert undo("u2") == {"micro_batches": 4, "lr": 0.1}
    assert undo("u3") == {"micro_batches": 4, "lr": 0.1}
    assert lab.update_log.state.commands["u3"].why == "there is no change to undo"


def test_a_trial_ends_with_the_run_and_reports_why(lab: Lab) -> None:
    lab.trials.start(EIGHT)
    lab.run(3)
    lab.control.leader_ended("the leader, rank 0, is gone")
    lab.trials.tick()
    trial = lab.update_log.state.trials["t"]
    assert (trial.state, trial.why) == (
        "failed",
        "the run ended before the trial was decided: the leader, rank 0, is gone",
    )
