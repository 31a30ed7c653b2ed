"""Faults 5, 6 and 19 of docs/evidence/faults.md: a network partition, a subscriber that stalls, and many ranks that
reconnect at once."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import protocol
from agents.client import Client
from agents.protocol import Credit, Refused, Timeline
from tests.faults.forwarder import Forwarder
from tests.faults.scaled import program
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import (
    Fleet,
    HubProcess,
    Peer,
    environment,
    make_hello,
    make_step,
    poll_until,
)

LOST_AFTER_S = 1.5  # scaled down, so that a partition of 4 s corresponds to one of 13 s
PARTITION_S = 4.0
STORM = 1024  # number of ranks


def memory_bytes(pid: int, what: str = "VmRSS") -> int:
    """The resident memory of a process, or its peak if `what` is `VmHWM`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) << 10


@pytest.fixture
def impatient_hub(tmp_path: Path) -> Iterator[HubProcess]:
    hub = HubProcess(tmp_path / "run")
    command = program("agents.hub.process", {"agents.hub.telemetry.membership.LOST_AFTER_S": LOST_AFTER_S})
    hub.process = subprocess.Popen(
        [*command, "--run", "r", "--dir", str(hub.folder), "--sockets", str(hub.endpoints.directory)],
        env=environment(),
    )
    yield hub
    hub.clean_up()


def test_a_partition_delays_and_loses_no_command(impatient_hub: HubProcess, opened: Opened) -> None:
    cable = opened(Forwarder(impatient_hub.endpoints.ranks))
    client, fleet = opened(Client(impatient_hub.endpoints.clients)), opened(Fleet(cable.endpoint))
    longest = 0.0

    def train_for(seconds: float) -> None:
        nonlocal longest
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            fleet.turn()
            longest = max(longest, time.monotonic() - began)
            client.poll(0.02)

    poll_until(client, lambda: len(client.state.steps) == 4 and client.state.board, fleet.turn)
    cable.cut()
    train_for(PARTITION_S)
    assert len(client.state.gone) == 4 and not any(gone.clean for gone in client.state.gone.values())
    cable.heal()
    poll_until(client, lambda: not client.state.gone, fleet.turn)
    poll_until(client, lambda: client.state.steps[3].step >= fleet.step - 3, fleet.turn)
    cable.cut()
    id = client.propose({"micro_batches": 8})
    train_for(0.7 * LOST_AFTER_S)  # before the hub notices; later it would refuse
    assert client.state.commands[id].state == "accepted"
    cable.heal()
    poll_until(client, lambda: client.state.commands[id].settled, fleet.turn)
    found = client.state.commands[id]
    assert (found.state, found.acks) == ("applied", 4) and fleet.boards[3].values["micro_batches"] == 8
    assert fleet.carried_out.count(found.revision) == 1
    assert longest < 0.5, "training never waits"


def test_a_stalled_subscriber_affects_only_itself(own_hub: HubProcess, opened: Opened) -> None:
    """The hub publishes many times more data than its update log keeps, while eight subscribers grant credit but never
    read."""
    client, rank = opened(Client(own_hub.endpoints.clients)), opened(Peer(own_hub.endpoints.ranks))
    rank.say(make_hello(0, 1))
    poll_until(client, lambda: client.state.hellos)
    stalled = [opened(Peer(own_hub.endpoints.clients)) for _ in range(8)]
    for peer in stalled:
        peer.say(Credit(protocol.VERSION, "", 0, 64))
    action = protocol.Action("F", 0, 0.5, 1.5)
    sizes = []
    for step in range(1, 601):  # of 190 KB each
        rank.say(Timeline(0, step, 1.0, [action] * 6000), make_step(0, step))
        if step % 200 == 0:
            poll_until(client, lambda: 0 in client.state.steps and client.state.steps[0].step == step)  # noqa: B023
            sizes.append(memory_bytes(own_hub.process.pid))
    assert sizes[2] - sizes[1] < 32 << 20, "frames kept for stalled subscribers would take 300 MB more"
    asleep = stalled[0]
    asleep.say(Credit(protocol.VERSION, client.epoch, 2, 64))
    seen = 0
    for _ in range(64 + 64):  # first the frames covered by the earlier credit, then the newest state
        updates = asleep.hear(protocol.Updates)
        assert isinstance(updates, protocol.Updates)
        seen = max([seen, *(u.step for u in updates.updates if isinstance(u, protocol.Step))])
        if updates.since is not None and seen == 600:
            break
    assert seen == 600


def test_many_ranks_reconnect_at_once(own_hub: HubProcess, opened: Opened) -> None:
    command = [sys.executable, "-m", "tests.bench.hub.fleet", own_hub.endpoints.ranks]
    fleet = subprocess.Popen([*command, str(STORM), "0", str(STORM), "1"], env=environment())
    try:
        client = opened(Client(own_hub.endpoints.clients))
        poll_until(client, lambda: len(client.state.hellos) == STORM)
        own_hub.kill()
        epoch = client.epoch
        own_hub.start()
        poll_until(client, lambda: client.epoch != epoch and len(client.state.hellos) == STORM)
        poll_until(client, lambda: len(client.state.steps) == STORM)
        assert client.refused is None and not client.state.gone
    finally:
        fleet.kill()
        fleet.wait()


def test_a_message_of_200_mib_closes_only_its_connection(own_hub: HubProcess, opened: Opened) -> None:
    client, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks))
    poll_until(client, lambda: client.state.board and len(client.state.steps) == 4, fleet.turn)
    before = memory_bytes(own_hub.process.pid, "VmHWM")
    for endpoint in (own_hub.endpoints.ranks, own_hub.endpoints.clients):
        opened(Peer(endpoint)).dealer.send(bytes(200 << 20))
    step = fleet.step
    poll_until(client, lambda: client.state.steps[0].step > step + 40, fleet.turn)
    assert memory_bytes(own_hub.process.pid, "VmHWM") - before < 64 << 20 and client.resets == 1
    peer = opened(Peer(own_hub.endpoints.clients))
    peer.say(make_step(0, 1))
    assert isinstance(peer.hear(Refused), Refused)
