"""A hub is killed and restarted while the ranks continue."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec import structs

from agents.client import Client
from agents.hub.telemetry.dropped import DroppedSteps
from agents.protocol import MISSING_STEPS, CommandState, Hello
from agents.rank.agent import Agent
from agents.recording.reader import Recording
from agents.rundir.runs import RECORD_FILE
from agents.waiting import wait_for_command
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import Fleet, HubProcess, environment, make_hello, make_step, poll_until


def applied(client: Client, fleet: Fleet, id: str) -> CommandState:
    poll_until(client, lambda: id in client.state.commands and client.state.commands[id].settled, fleet.turn)
    return client.state.commands[id]


def started(*options: str) -> subprocess.CompletedProcess[str]:
    """Run a hub process until it exits by itself."""
    command = [sys.executable, "-m", "agents.hub", "--run", "r", *options]
    return subprocess.run(command, env=environment(), capture_output=True, text=True)


def test_a_restarted_hub_serves_the_same_run(own_hub: HubProcess, opened: Opened) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    fleet = opened(Fleet(own_hub.endpoints.ranks))
    poll_until(client, lambda: client.state.board and len(client.state.hellos) == 4, fleet.turn)
    first = applied(client, fleet, client.propose({"micro_batches": 8}, id="first"))
    waits = client.propose({"micro_batches": 2}, id="waits")
    assert wait_for_command(client, waits, 5.0, settled=False).state == "accepted"
    poll_until(client, lambda: fleet.agents[0].pending)
    epoch = client.epoch

    # The hub is killed during a command: the ranks apply it and send acks to a hub that never reads them.
    own_hub.process.send_signal(signal.SIGSTOP)
    fleet.turn()
    time.sleep(0.3)
    own_hub.kill()
    for _ in range(20):
        fleet.turn()  # the ranks continue without the hub
    asked_while_dead = client.propose({"recompute": "full"}, id="sent while the hub was down")
    own_hub.start()

    after = applied(client, fleet, waits)
    assert client.epoch != epoch and client.resets >= 2
    assert len(client.state.hellos) == 4 and client.state.board is not None
    assert (after.state, after.revision, after.acks) == ("applied", first.revision + 1, 4)
    assert applied(client, fleet, asked_while_dead).state == "applied"
    assert client.state.commands["first"] == first, "known from the journal"
    applied(client, fleet, client.propose({"micro_batches": 1}, id="first"))
    assert fleet.boards[0].values["micro_batches"] == 2
    last = applied(client, fleet, client.propose({"micro_batches": 1}, id="last"))
    assert last.revision > after.revision
    assert sorted(set(fleet.carried_out)) == fleet.carried_out, "no command was applied twice"
    poll_until(client, lambda: client.state.summaries[-1].step == fleet.step)
    assert not client.state.gone


def test_a_full_disk_refuses_changes_and_telemetry_continues(own_hub: HubProcess, opened: Opened) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    fleet = opened(Fleet(own_hub.endpoints.ranks, 2))
    poll_until(client, lambda: client.state.board, fleet.turn)
    limits = resource.prlimit(own_hub.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(own_hub.process.pid, resource.RLIMIT_FSIZE, (1, limits[1]))
    refused = wait_for_command(client, client.propose({"micro_batches": 8}), 5.0)
    assert refused.state == "rejected" and "the journal cannot be written" in refused.why
    step = fleet.step
    poll_until(client, lambda: client.state.summaries[-1].step > step + 3, fleet.turn)
    resource.prlimit(own_hub.process.pid, resource.RLIMIT_FSIZE, limits)
    assert applied(client, fleet, client.propose({"micro_batches": 8})).state == "applied"


def test_one_run_has_one_hub(own_hub: HubProcess, opened: Opened) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    poll_until(client, lambda: client.resets)
    second = started("--dir", str(own_hub.folder))
    assert second.returncode == 2
    assert (
        second.stderr.startswith("the hub cannot start: another hub already serves")
        and "Traceback" not in second.stderr
    )


def test_a_hub_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(["sleep", "60"])
    hub = HubProcess(tmp_path / "run").start("--parent", str(parent.pid))
    try:
        client = Client(hub.endpoints.clients)
        poll_until(client, lambda: client.resets)
        client.close()
        parent.kill()
        parent.wait()
        assert hub.process.wait(5) == 0
        assert not hub.endpoints.directory.exists()
    finally:
        parent.kill()
        hub.clean_up()


@pytest.mark.parametrize("sockets", ["/proc/nowhere", "/tmp", "x" * 200])
def test_invalid_sockets_get_one_sentence(tmp_path: Path, sockets: str) -> None:
    ended = started("--dir", str(tmp_path), "--sockets", str(tmp_path / sockets))
    assert ended.returncode == 2 and ended.stderr.startswith("the hub cannot start: the socket")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_lock_that_is_not_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all I have")
    lock = tmp_path / "run" / ".hub.lock"
    lock.parent.mkdir()
    if kind == "link":
        lock.symlink_to(precious)
    else:
        os.mkfifo(lock)
    ended = started("--dir", str(lock.parent))
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    what = "a link" if kind == "link" else "not a regular file"
    assert f".hub.lock cannot be locked: .hub.lock is {what}" in ended.stderr
    assert precious.read_text() == "all I have"


def test_steps_that_a_suspended_hub_did_not_take_are_one_warning_and_missing(
    own_hub: HubProcess, opened: Opened
) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    fleet = opened(Fleet(own_hub.endpoints.ranks, 2))
    poll_until(client, lambda: len(client.state.steps) == 2, fleet.turn)
    poll_until(client, lambda: client.state.summaries[-1].step == fleet.step)
    os.kill(own_hub.process.pid, signal.SIGSTOP)
    began = fleet.step
    while not all(agent.lost_records for agent in fleet.agents) or fleet.step < began + 6000:
        fleet.turn()
    os.kill(own_hub.process.pid, signal.SIGCONT)
    events = client.state.events
    poll_until(client, lambda: any(MISSING_STEPS in event.facts for event in events), fleet.turn)
    (event,) = [event for event in events if MISSING_STEPS in event.facts]
    first, last = event.facts["first_step"], event.facts["last_step"]
    assert isinstance(first, int) and isinstance(last, int) and began <= first < last < fleet.step
    assert event.level == "warning"
    assert event.text.startswith(f"records of the steps {first} to {last} are missing: 2 ranks dropped ")
    count = event.facts[MISSING_STEPS]
    assert isinstance(count, int) and 4000 < count <= 2 * (last - first + 1)
    fleet.close()
    own_hub.stop()
    recording = Recording(own_hub.folder / RECORD_FILE)
    assert len(list(recording.moments())) > 0 and recording.damage == [event.text]


def test_a_gap_in_the_numbers_of_a_rank_is_what_it_has_dropped() -> None:
    dropped = DroppedSteps()
    one, other = make_hello(1, 2), make_hello(1, 2, process_start=7)

    def send(hello: Hello, step: int, seq: int, lost: int = 0, all_noted: bool = True) -> None:
        record = structs.replace(make_step(1, step), seq=seq, lost_records=lost)
        dropped.note(hello, record, all_noted)

    for step, seq in ((10, 1), (20, 2), (60, 6), (70, 7)):  # every tenth step
        send(one, step, seq)
    assert dropped.take(2.0) is None, "more gaps may follow"
    event = dropped.take(2.0)
    assert event and event.text == (
        "records of the steps 21 to 59 are missing: rank 1 dropped 3 of them, because the hub did not take them in time"
    )
    assert dropped.take(2.0) is None
    send(other, 1, 50)  # another process counts anew
    send(other, 2, 51)
    send(other, 9, 58, all_noted=False)  # a large world, in which the hub does not read each record
    send(other, 12, 61, lost=2, all_noted=False)
    assert dropped.take(2.0) is None
    fresh = DroppedSteps(first_hub=True)
    fresh.note(one, structs.replace(make_step(1, 500), seq=501, lost_records=900), True)
    assert fresh.take(2.0) is None
    event = fresh.take(2.0)
    assert event and "the steps 0 to 499 are missing: rank 1 dropped 500 of them" in event.text
    dropped.idle_s = 31.0
    event = dropped.take(2.0)
    assert event and event.facts[MISSING_STEPS] == 2 and event.text.endswith("(it did not run for 31 s)")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"run": "other"}, "rank 1 belongs to run other, but this hub serves run r"),
        ({"world": 3}, "rank 1 has a world of 3 ranks, but this run has 2"),
        ({"process_start": 5}, "rank 1 is already connected, as process"),
    ],
)
def test_a_process_that_the_hub_refuses_is_told_so(
    hub: HubProcess,
    fleet: Fleet,
    opened: Opened,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, object],
    why: str,
) -> None:
    monkeypatch.setattr("agents.rank.hub_link.REFUSED_PAUSE_S", 0.5)
    client = opened(Client(hub.endpoints.clients))
    poll_until(client, lambda: len(client.state.hellos) == 4)
    intruder = opened(Agent(hub.endpoints.ranks, fleet.doing))
    intruder.introduce(make_hello(**{"rank": 1, "world": 4} | fields), None)  # type: ignore[arg-type]
    why = why.replace("has 2", "has 4")
    poll_until(
        client, lambda: f"the hub refuses this rank, so the run does not show it: {why}" in caplog.text
    )
    assert caplog.text.count(why) == 1
