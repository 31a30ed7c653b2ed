"""A restarted hub restores the history of its own run only."""

import math
import os
import sqlite3
import time
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from agents.alerts.detection import Detection, all_detectors
from agents.client import Client
from agents.hub.telemetry.history import History, RestoredHistory, belonging
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Event, Recalled, Update
from agents.recording.endings import Ending
from agents.state.run_state import EVENTS, HISTORY, RunState
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import DEADLINE_S, Fleet, HubProcess, make_hello, make_summary, poll_until
from tests.unit.agents.recording.test_endings import tape
from tests.unit.agents.recording.test_replay import recorded

ANOTHER = os.getpid() + 1

LOST = "the history of the run before this hub started is lost: "


class Successor(Fleet):
    """The ranks of a resumed run, whose first step is `step` + 1."""

    def __init__(self, endpoint: str, step: int) -> None:
        super().__init__(endpoint)
        self.step = step
        super().introduce()

    def introduce(self) -> None:
        if self.step:
            super().introduce()


def event(text: str, time_s: float = 0.0) -> Event:
    return Event(time_s, "info", "hub", text)


def steps(client: Client) -> list[int]:
    return [summary.step for summary in client.state.summaries]


def texts(client: Client) -> list[str]:
    return [told.text for told in client.state.events]


@pytest.fixture
def run(own_hub: HubProcess, opened: Opened) -> Fleet:
    """Four ranks whose hub has recorded at least twenty steps, an event and an applied change, and has then been
    killed."""
    client = opened(Client(own_hub.endpoints.clients))
    fleet = opened(Fleet(own_hub.endpoints.ranks))
    poll_until(client, lambda: client.state.board and len(client.state.hellos) == 4)
    fleet.agents[0].send(event("sent to the first hub"))
    poll_until(client, lambda: len(steps(client)) >= 20, fleet.turn)
    change = client.propose({"micro_batches": 8}, id="change")
    poll_until(
        client, lambda: change in client.state.commands and client.state.commands[change].settled, fleet.turn
    )
    poll_until(client, lambda: steps(client)[-1] == fleet.step)
    last = client.seq
    poll_until(client, lambda: recorded(own_hub.folder / "run.db") >= last)
    own_hub.kill()
    return fleet


def test_a_restarted_hub_restores_the_curve(own_hub: HubProcess, opened: Opened, run: Fleet) -> None:
    before = run.step
    own_hub.start()
    client = opened(Client(own_hub.endpoints.clients))
    poll_until(client, lambda: steps(client)[:1] == [1], lambda: time.sleep(0.02))
    poll_until(client, lambda: steps(client)[-1] == run.step, run.turn)
    assert steps(client)[:before] == list(range(1, before + 1))
    assert texts(client).count("sent to the first hub") == 1
    assert client.state.commands["change"].settled
    assert not client.state.alerts


def test_hubs_killed_before_restoring_history_lose_nothing(
    own_hub: HubProcess, opened: Opened, run: Fleet
) -> None:
    before = run.step
    for hub_lives in range(3):
        own_hub.start()
        with_it = opened(Client(own_hub.endpoints.clients))
        poll_until(with_it, lambda client=with_it: client.resets)  # type: ignore[misc]
        if hub_lives:
            poll_until(with_it, lambda client=with_it: client.state.board, run.turn)  # type: ignore[misc]
        own_hub.kill()
    own_hub.start()
    client = opened(Client(own_hub.endpoints.clients))
    poll_until(client, lambda: len(steps(client)) > before and steps(client)[0] == 1, run.turn)
    assert steps(client)[:before] == list(range(1, before + 1))
    assert texts(client).count("sent to the first hub") == 1


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_curve_of_an_earlier_run_is_kept_after_a_resume(
    own_hub: HubProcess, opened: Opened, run: Fleet, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    run.close()
    own_hub.start()
    monkeypatch.setattr(os, "getpid", lambda: ANOTHER)
    first = 11 if goes_on else 1
    fleet = opened(
        Successor(own_hub.endpoints.ranks, first - 1) if goes_on else Fleet(own_hub.endpoints.ranks)
    )
    monkeypatch.undo()
    client = opened(Client(own_hub.endpoints.clients))
    poll_until(client, lambda: client.state.board)
    assert not steps(client)
    seen = poll_until(
        client, lambda: fleet.step >= first + 100 and steps(client)[-1] == fleet.step, fleet.turn
    )
    poll_until(client, lambda: not goes_on or steps(client)[0] == 1)
    assert steps(client)[0] == 1 and (steps(client)[:11] == list(range(1, 12)) or not goes_on)
    assert ("sent to the first hub" in texts(client)) == goes_on
    assert any(isinstance(update, Recalled) for update in seen) or not goes_on


def test_without_a_recording_no_history_is_restored(own_hub: HubProcess, opened: Opened, run: Fleet) -> None:
    before = run.step
    own_hub.start("--record-mb", "0")
    client = opened(Client(own_hub.endpoints.clients))
    poll_until(
        client, lambda: run.step > before + 60 and steps(client) and steps(client)[-1] == run.step, run.turn
    )
    assert steps(client)[0] > before and "sent to the first hub" not in texts(client)


def test_a_damaged_recording_loses_only_the_history(own_hub: HubProcess, opened: Opened, run: Fleet) -> None:
    with sqlite3.connect(own_hub.folder / "run.db") as db:
        db.execute("UPDATE segments SET snapshot = x'00'")
    db.close()
    before = run.step
    own_hub.start()
    client = opened(Client(own_hub.endpoints.clients))
    poll_until(client, lambda: any(text.startswith(LOST) for text in texts(client)), run.turn)
    poll_until(client, lambda: steps(client) and steps(client)[-1] == run.step > before, run.turn)
    assert steps(client)[0] > before
    assert sum(text.startswith(LOST) for text in texts(client)) == 1


def test_an_invalid_database_does_not_stop_the_hub(own_hub: HubProcess, opened: Opened, run: Fleet) -> None:
    own_hub.folder.joinpath("run.db").write_bytes(b"no database\n" * 1000)
    for other in ("run.db-wal", "run.db-shm"):
        own_hub.folder.joinpath(other).unlink(missing_ok=True)
    own_hub.start()
    client = opened(Client(own_hub.endpoints.clients))
    poll_until(client, lambda: any(text.startswith(LOST) for text in texts(client)), run.turn)
    poll_until(client, lambda: steps(client) and steps(client)[-1] == run.step, run.turn)


# ---------------------------------------------------------------------------------------- history of this run

HERE = make_hello(0, 1, step=5, began_s=1000.0)

OTHER = structs.replace(HERE, pid=ANOTHER)


def ending(leader: object, first: int, last: int, *told: Event) -> Ending:
    return Ending(leader, [make_summary(n) for n in range(first, last + 1)], list(told))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "known", "belongs"),
    [
        ([], None, []),
        ([ending(HERE, 0, 4)], None, [0, 1, 2, 3, 4]),
        ([ending(HERE, 0, 4)], 3, [0, 1, 2]),
        ([ending(HERE, 0, 9)], None, [0, 1, 2, 3, 4, 5]),  # the run has not reached the later steps
        ([ending(structs.replace(HERE, began_s=1000.5), 0, 4)], None, [0, 1, 2, 3, 4]),
        ([ending(OTHER, 0, 4)], None, None),  # the step from which the run resumes is not known yet
        ([ending(OTHER, 0, 4)], 0, []),
        ([ending(OTHER, 0, 4)], 3, [0, 1, 2]),
        # Another process with the same process id.
        ([ending(structs.replace(HERE, began_s=990.0), 0, 4)], 0, []),
        ([ending(structs.replace(HERE, run="other"), 0, 4)], 3, []),
        ([ending(HERE, 3, 4), ending(HERE, 0, 3)], None, [0, 1, 2, 3, 4]),
        ([ending(HERE, 3, 4), ending(OTHER, 0, 3)], None, [0, 1, 2, 3, 4]),
        ([ending(HERE, 0, 4), ending(OTHER, 0, 9)], None, [0, 1, 2, 3, 4]),
        ([ending(HERE, 5, 4), ending(OTHER, 0, 9)], None, None),
        ([ending(HERE, 5, 4), ending(OTHER, 0, 9)], 0, []),
    ],
)
def test_only_the_history_of_the_run_is_restored(
    found: list[Ending], known: int | None, belongs: list[int] | None
) -> None:
    restored = belonging(found, HERE, known)
    assert (None if restored is None else [one.step for one in restored.summaries]) == belongs


def test_events_are_published_once() -> None:
    a, b, c = event("a", 1.0), event("b", 2.0), event("c", 3.0)
    restored = belonging([ending(HERE, 3, 4, b, c), ending(HERE, 0, 4, a, b)], HERE, None)
    assert restored is not None and restored.events == [a, b, c]
    assert belonging([ending(OTHER, 0, 4, a)], HERE, 0) == RestoredHistory()


def test_history_is_inserted_before_known_steps(tmp_path: Path) -> None:
    told = [event(f"event {n}", n) for n in range(EVENTS)]
    path = tape(
        tmp_path / "run.db", ("a", [make_hello(0, 1, step=3000), *map(make_summary, range(3000)), *told])
    )
    update_log = UpdateLog()
    recall = History(path, update_log)
    assert not recall.tick(None)
    for update in (make_hello(0, 1, step=3001), event("now", 1e9), make_summary(3001)):
        update_log.publish(update)
    before = update_log.seq
    deadline = time.monotonic() + DEADLINE_S
    while not recall.tick(0):  # until the recording is readable
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)
    assert not recall.tick(0), "it is published once"
    state = update_log.state
    assert [one.step for one in state.summaries] == [*range(3001 - HISTORY, 3000), 3001]
    assert (state.curve.first, state.curve.last, state.curve.width) == (0, 3000 - HISTORY, 2)
    assert len(state.points("loss")) == 3001, "two steps to a bucket are both kept"
    assert [one.text for one in state.events] == [f"event {n}" for n in range(1, EVENTS)] + ["now"]
    follower = RunState()
    for update in (make_hello(0, 1, step=3001), event("now", 1e9), make_summary(3001)):
        follower.apply(update)
    for packed in update_log.after(before):
        follower.apply(msgspec.msgpack.decode(packed, type=Update))
    assert list(follower.replay()) == list(state.replay())


def test_history_raises_no_alerts() -> None:
    broken = [structs.replace(make_summary(n), loss=math.nan if n == 90 else 2.0) for n in range(100)]
    state = RunState()
    state.apply(make_hello(0, 1))
    state.apply(Recalled(broken))
    watch = Detection(all_detectors())
    watch.learn(state, 0.0)
    assert watch.check(state, 1.0) == []
    state.apply(structs.replace(make_summary(100), loss=50.0))
    assert [alert.name for alert in watch.check(state, 2.0)] == ["loss_spike"], (
        "the detector has learned the baseline"
    )
