"""Waiting for the outcome of a request, also if the run ends before the outcome arrives. The tests use a fake client
without a hub.
"""

from collections.abc import Callable

import pytest

from agents.protocol import CommandState, Gone, Previewed, TrialState, Update
from agents.state.run_state import RunState
from agents.waiting import RunOverError, wait_for_command, wait_for_preview, wait_for_trial
from tests.unit.agents.fleet import make_hello

HOUR_S = 3600.0
HALF = CommandState("c", 1, "applied", {"lr": 1.0}, {}, "", 0.0, 1, 2, 5)
WAITS = CommandState("c", 1, "accepted", {"lr": 1.0}, {}, "", 0.0, world=2)
TRIAL = TrialState("t", "before", {"lr": 1.0}, {}, 30, "", 0.0, True, 0.0)


class FakeClient:
    """A fake client of a run with two ranks. Each poll returns the next updates; a poll after the last updates fails
    the test.
    """

    def __init__(self, *coming: Update) -> None:
        self.state = RunState()
        self.denied: dict[str, str] = {}
        self.previews: dict[str, Previewed] = {}
        self.refused = None
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


def _fields(state: CommandState | TrialState) -> dict[str, object]:
    return {name: getattr(state, name) for name in state.__struct_fields__}
