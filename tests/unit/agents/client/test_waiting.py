"""Waiting for the outcome of a request, also if the run ends before the outcome arrives. The tests use a fake client
without a hub.
"""

from collections.abc import Callable

import pytest

from agents.protocol import RESTART, CommandState, Event, Gone, Previewed, TrialState, Update
from agents.state.run_state import RunState
from agents.waiting import (
    RunOverError,
    wait_for_command,
    wait_for_preview,
    wait_for_restart,
    wait_for_trial,
)
from tests.unit.agents.fleet import make_hello

HOUR_S = 3600.0
HALF = CommandState("c", 1, "applied", {"lr": 1.0}, {}, "", 0.0, 1, 2, 5)
WAITS = CommandState("c", 1, "accepted", {"lr": 1.0}, {}, "", 0.0, world=2)
TRIAL = TrialState("t", "before", {"lr": 1.0}, {}, 30, "", 0.0, True, 0.0)
WAITS2, APPLIED2 = (
    CommandState("c", 2, state, {"layout": "grid.tp=2"}, {}, "", 0.0, acks, 2)
    for state, acks in (("accepted", 0), ("applied", 2))
)


class FakeClient:
    """A fake client of a run with two ranks. Each poll returns the next updates; a poll after the last updates fails
    the test.
    """

    def __init__(self, *coming: Update) -> None:
        self.state = RunState()
        self.denied: dict[str, str] = {}
        self.previews: dict[str, Previewed] = {}
        self.refused = None
        self.age_s: float | None = 0.0
        self._coming = iter(coming)
        for rank in range(2):
            self.state.apply(make_hello(rank, 2))

    def poll(self, timeout_s: float) -> None:
        self.state.apply(next(self._coming))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.waiting.LAST_S", 0.0)


def gone(rank: int) -> Gone:
    return Gone(rank, clean=False, process="ended")


def test_a_final_refusal_of_a_rank_ends_the_wait() -> None:
    refused = CommandState(**{**_fields(HALF), "failed": 1, "why": "rank 1 reports rejected"})  # type: ignore[arg-type]
    assert wait_for_command(FakeClient(HALF, refused), "c", HOUR_S) == refused  # type: ignore[arg-type]


@pytest.mark.parametrize(("left", "state"), [(WAITS, "expired"), (HALF, "applied")])
def test_the_end_of_the_run_ends_the_wait_for_a_command(left: CommandState, state: str) -> None:
    told = wait_for_command(FakeClient(left, gone(0), gone(1)), "c", HOUR_S)  # type: ignore[arg-type]
    assert told.state == state and "the run ended" in told.why


@pytest.mark.parametrize("wait", [wait_for_trial, wait_for_preview])
def test_the_end_of_the_run_ends_every_wait(wait: Callable[..., object]) -> None:
    with pytest.raises(RunOverError, match="the run ended"):
        wait(FakeClient(TRIAL, gone(0), gone(1)), "t", HOUR_S)


def test_the_last_state_from_the_hub_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.waiting.LAST_S", HOUR_S)
    failed = TrialState(**{**_fields(TRIAL), "state": "failed", "why": "the run ended"})  # type: ignore[arg-type]
    assert wait_for_trial(FakeClient(TRIAL, gone(0), gone(1), failed), "t", HOUR_S) == failed  # type: ignore[arg-type]


def restarted(number: int, revision: int) -> Event:
    facts = {RESTART: number, "cause": "relayout", "revision": revision, "step": 9 * revision}
    return Event(0.0, "info", "rank 0", "the ranks train again", facts)  # type: ignore[arg-type]


def test_a_restart_of_an_earlier_launcher_is_not_taken_for_the_restart_that_was_asked_for() -> None:
    """The launcher of a resumed run counts its restarts from 1 again."""
    client = FakeClient(WAITS2, restarted(2, 2))
    for number, revision in ((1, 1), (2, 1), (3, 1)):
        client.state.apply(restarted(number, revision))
    assert wait_for_restart(client, "c", HOUR_S) == restarted(2, 2)  # type: ignore[arg-type]


def test_the_wait_for_a_restart_ends_with_the_run_and_with_a_refusal() -> None:
    leaves = [Gone(rank, clean=False, process="restarting") for rank in range(2)]
    with pytest.raises(RunOverError, match="before its ranks trained"):
        wait_for_restart(FakeClient(APPLIED2, *leaves, gone(0), gone(1)), "c", HOUR_S)  # type: ignore[arg-type]
    back = CommandState(**{**_fields(APPLIED2), "state": "rolled_back"})  # type: ignore[arg-type]
    assert wait_for_restart(FakeClient(APPLIED2, back), "c", HOUR_S) == back  # type: ignore[arg-type]
    expired = wait_for_restart(FakeClient(WAITS2, gone(0), gone(1)), "c", HOUR_S)  # type: ignore[arg-type]
    assert isinstance(expired, CommandState) and expired.state == "expired"


@pytest.mark.parametrize("wait", [wait_for_trial, wait_for_restart])
def test_a_hub_that_was_killed_with_its_run_ends_the_wait(wait: Callable[..., object]) -> None:
    client = FakeClient(APPLIED2, TRIAL)
    client.age_s = 31.0
    with pytest.raises(RunOverError, match="silent for 30 s"):
        wait(client, "c", HOUR_S)


def _fields(state: CommandState | TrialState) -> dict[str, object]:
    return {name: getattr(state, name) for name in state.__struct_fields__}
