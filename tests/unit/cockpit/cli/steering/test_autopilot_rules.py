"""The rules of `cockpit autopilot` and `cockpit advise`, without a hub."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from agents.protocol import (
    Board,
    Changes,
    Estimate,
    KnobState,
    Legal,
    Previewed,
    TrialState,
    Value,
)
from agents.state.preview_checks import Check, check_event, trust
from agents.state.run_state import RunState
from cockpit.cli.steer.autopilot import Autopilot, Options
from cockpit.knobs.advice import candidate, refuted
from cockpit.knobs.autopilot import Watch, loss_kept, outside, parse_bounds
from engine.planner.advice import Candidate

Said = pytest.CaptureFixture[str]


def trial(state: str, high: float, before: Value = 4) -> TrialState:
    return TrialState(
        "t",
        state,  # type: ignore[arg-type]
        {"micro_batches": 8},
        {"micro_batches": before},
        30,
        "me",
        0.0,
        True,
        0.0,
        ratio=high - 0.05,
        low=high - 0.1,
        high=high,
    )


def test_only_a_measured_trial_from_the_current_value_excludes_a_change() -> None:
    values: Changes = {"micro_batches": 4}
    assert refuted([trial("reverted", 1.05)], values)
    assert not refuted([trial("kept", 0.95)], values)
    assert not refuted([trial("reverted", 0.95)], values), "faster, but it changes the loss"
    assert not refuted([trial("reverted", 1.05, before=2)], values)
    assert not refuted([structs.replace(trial("reverted", 1.05), high=None)], values), "ended by hand"


@pytest.mark.parametrize(
    ("now", "after", "fits"),
    [
        (40.0, 46.0, ""),
        (40.0, 50.0, "would fill 100 % of a device's memory"),
        (40.0, 39.0, ""),
        (None, 50.0, ""),
    ],
)
def test_a_change_that_would_raise_the_memory_alert_does_not_fit(
    now: float | None, after: float, fits: str
) -> None:
    answer = Previewed("", {}, 0, "", True, [Estimate("peak_bytes", now, after)])
    assert candidate({"micro_batches": 8}, answer, 0.8).does_not_fit == fits
    assert candidate({"micro_batches": 8}, answer, None).does_not_fit == ""


def test_a_trial_is_outside_only_if_the_two_intervals_do_not_meet() -> None:
    predicted = Candidate({"micro_batches": 8}, 100.0, (80.0, 90.0))
    assert not outside(trial("kept", 0.95), predicted)
    assert not outside(trial("kept", 0.82), predicted)
    assert "outside the predicted -20.0 % to -10.0 %" in outside(trial("kept", 0.75), predicted)
    assert outside(trial("reverted", 1.05), predicted)
    assert not outside(trial("reverted", 1.05), structs_without_times(predicted))


def structs_without_times(one: Candidate) -> Candidate:
    return Candidate(one.changes, None, None)


def test_bounds() -> None:
    board = Board(
        0,
        0,
        "",
        [
            KnobState("micro_batches", 4, Legal([1, 2, 4, 8, 16]), True),
            KnobState("recompute", "none", Legal(["none", "selective", "full"]), True),
            KnobState("capacity_factor", None, Legal(low=0.1, high=8.0, optional=True), False),
            KnobState("lr_scale", 1.0, Legal(low=0.0, high=10.0), False),
            KnobState("zero", 2, Legal([1, 2, 3]), True),
        ],
    )
    words = ["micro_batches=2..8", "recompute=none,full", "capacity_factor=1.1..1.4", "lr_scale=0.7,1"]
    assert parse_bounds(words).changes(board) == [
        {"micro_batches": 2},
        {"micro_batches": 8},
        {"recompute": "full"},
        {"capacity_factor": 1.25},
        {"capacity_factor": 1.1},
        {"capacity_factor": 1.4},
        {"lr_scale": 0.7},
    ]


@pytest.mark.parametrize(
    ("before", "after", "kept"), [(2.0, 2.03, True), (2.0, 2.05, False), (2.0, math.nan, False)]
)
def test_a_change_of_the_loss_is_proposed_again_only_if_the_loss_did_not_grow(
    before: float, after: float, kept: bool
) -> None:
    measured = structs.replace(
        trial("reverted", 0.8), loss_neutral=False, loss_before=before, loss_after=after
    )
    assert loss_kept(measured) is kept
    assert not loss_kept(structs.replace(measured, loss_after=None))


class LateClient:
    """A client that receives a trial's state only after it has sent its decision on the trial."""

    def __init__(self) -> None:
        self.state, self.denied, self.decided, self.age_s = RunState(), {}, [], 0.0

    def decide(self, trial: str, keep: bool) -> None:
        self.decided.append((trial, keep))

    def poll(self, timeout_s: float) -> None:
        if self.decided:
            self.state.trials["t"] = trial("reverted", 1.0)


def test_a_trial_that_the_client_does_not_know_yet_is_taken_back(capsys: Said) -> None:
    connection: Any = SimpleNamespace(client=LateClient())
    options = Options((), 30, 2.0, 5)
    Autopilot(connection, options, parse_bounds([]), Watch(RunState()), trial="t").take_back()
    assert connection.client.decided == [("t", False)] and "reverted" in capsys.readouterr().out
    Autopilot(connection, options, parse_bounds([]), Watch(RunState())).take_back()
    assert len(connection.client.decided) == 1, "no trial is running"


def test_earlier_events_do_not_stop_it() -> None:
    state = RunState()
    for rank in range(2):
        state.apply(check_event(0.0, rank, {}, []))
    assert Watch(state).surprise(state) == ""


def test_trust_counts_hits_and_errors() -> None:
    checks = [Check("step_ms", 100.0, 80.0, 70.0, 90.0, measured) for measured in (80.0, 100.0)]
    events = [check_event(0.0, 1, {"k": (1, 2)}, [one]) for one in checks]
    found = trust(events)["step_ms"]
    assert (found.checks, found.hits) == (2, 1) and found.mean_error == pytest.approx(0.1)
    assert trust([structs.replace(events[0], facts={"revision": 1})]) == {}
