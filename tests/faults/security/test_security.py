"""Tests of hostile and unauthorised connections to a hub's TCP port (faults 8, 10 and 11 of docs/evidence/faults.md).

Without a valid key, no message is accepted. For a connection with a valid key, the key's role determines which messages
are allowed. The role is checked for every message, because a key may be revoked while its connection is open.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import zmq

from agents import protocol
from agents.client import Client
from agents.protocol import Credit, Decide, Propose, Refused, Try, codec
from agents.rank.agent import Agent
from agents.rundir.local_machine import this_host
from agents.rundir.socket_directory import endpoints_in, make_socket_directory
from agents.transport.curve_keys import Key, KeyStore, load_key
from agents.transport.roles import Role
from agents.waiting import wait_for_command
from cockpit.data.diagnosis.diagnosis import Level, diagnosis
from cockpit.data.sources.live import LiveSource
from cockpit.data.store import Store
from tests.faults.conftest import Opened
from tests.faults.guarded import Guarded, wait, watch
from tests.unit.agents.fleet import DEADLINE_S, SOURCE, Peer, make_hello, make_step, poll_until

pytestmark = pytest.mark.xdist_group("security")  # the tests of this file share a fixture

MIB = 1 << 20


# --------------------------------------------------------------------------------------------- fault 8


def zmtp1(*messages: protocol.Message) -> bytes:
    """The bytes that a ZMTP 1.0 peer sends: no identity, one frame per message, no security."""
    frame = codec.encode(messages)
    return b"\x01\x00" + b"\xff" + (len(frame) + 1).to_bytes(8) + b"\x00" + frame


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"  # greeting of ZMTP 3.0, up to the mechanism

KNOCKS = {
    "garbage": os.urandom(4096),
    "zeros": bytes(4096),
    "http": b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + os.urandom(500),
    "zmtp 1.0": zmtp1(make_hello(7, 8), make_step(7, 1)),
    "zmtp 1.0, a client": zmtp1(Credit(protocol.VERSION, "", 0, 8), Propose("stolen", {"micro_batches": 8})),
    "null security": GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x05READY",
    "curve, half a handshake": GREETING
    + b"CURVE".ljust(20, b"\0")
    + bytes(32)
    + b"\x04\xc8\x05HELLO"
    + bytes(194),
    "200 MiB announced": GREETING
    + b"CURVE".ljust(20, b"\0")
    + bytes(32)
    + b"\x06"
    + (200 * MIB).to_bytes(8)
    + bytes(65536),
}


@pytest.mark.parametrize("knock", KNOCKS)
def test_foreign_peers_are_rejected(guarded: Guarded, opened: Opened, knock: str) -> None:
    client = watch(guarded, opened)
    events = len(client.state.events)
    for _ in range(3):
        with guarded.connect() as stranger:
            stranger.sendall(KNOCKS[knock])
            stranger.settimeout(0.05)
            said = b""
            try:
                while more := stranger.recv(4096):
                    said += more
            except OSError:
                pass  # the hub sends no more data, or has closed the connection
        assert b"updates" not in said and b"epoch" not in said
    step = guarded.fleet.step
    poll_until(client, lambda: client.state.steps[0].step > step + 3, guarded.fleet.turn)
    assert set(client.state.hellos) == {0, 1, 2, 3}
    assert not client.state.commands.get("stolen") and client.refused is None
    assert [event.text for event in list(client.state.events)[events:]] == []


def test_foreign_connections_leave_nothing_behind(guarded: Guarded, opened: Opened) -> None:
    watch(guarded, opened)
    hub = psutil.Process(guarded.hub.process.pid)
    before = hub.num_fds()
    for _ in range(50):
        with guarded.connect() as stranger:
            stranger.sendall(KNOCKS["garbage"])
    wait(lambda: hub.num_fds() <= before + 2, guarded.fleet.turn)


def test_a_peer_without_a_key_is_rejected(guarded: Guarded, opened: Opened) -> None:
    """The peer uses a ZeroMQ socket and the hub's protocol, but not CURVE."""
    client = watch(guarded, opened)
    intruder = opened(Peer(guarded.url))
    intruder.say(Credit(protocol.VERSION, "", 0, 8))
    intruder.say(make_hello(7, 8))
    step = guarded.fleet.step
    poll_until(client, lambda: client.state.steps[0].step > step + 20, guarded.fleet.turn)
    assert intruder.dealer.poll(0) == 0 and 7 not in client.state.hellos


# -------------------------------------------------------------------------------------------- fault 10


def test_a_message_of_200_mib_closes_only_its_connection(guarded: Guarded, opened: Opened) -> None:
    """libzmq closes the connection as soon as it reads the length of the message, so the hub never buffers the
    message."""
    client = watch(guarded, opened)
    hub = psutil.Process(guarded.hub.process.pid)
    before = hub.memory_info().rss
    peer = opened(Peer(guarded.url, guarded.rank))
    monitor = peer.dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    most = 0

    def turn() -> None:
        nonlocal most
        most = max(most, hub.memory_info().rss)
        guarded.fleet.turn()

    try:
        assert monitor.poll(int(1000 * DEADLINE_S)), "it was not let in at all"
        monitor.recv_multipart()
        peer.dealer.send(bytes(200 * MIB))
        wait(lambda: monitor.poll(0), turn)
    finally:  # closing the context would wait forever for an open monitor
        peer.dealer.disable_monitor()
        monitor.close(0)
    step = guarded.fleet.step
    poll_until(client, lambda: client.state.steps[0].step > step + 3, turn)
    assert client.resets == 1 and client.refused is None
    assert most - before < 32 * MIB


# -------------------------------------------------------------------------------------------- fault 11


def test_a_viewer_watches_and_an_operator_changes(guarded: Guarded, opened: Opened) -> None:
    viewer, operator = watch(guarded, opened), watch(guarded, opened, guarded.operator)
    asked = viewer.propose({"micro_batches": 2}, who="root@console")
    denied = wait_for_command(viewer, asked, 5.0)
    assert denied.state == "rejected" and denied.revision == 0
    assert denied.why == "the key ann has the role viewer; changes require the role operator"
    assert guarded.fleet.carried_out == [] and asked not in operator.state.commands
    asked = operator.propose({"micro_batches": 2}, who="root@console")
    poll_until(operator, lambda: (c := operator.state.commands.get(asked)) and c.settled, guarded.fleet.turn)
    command = operator.state.commands[asked]
    assert (command.state, command.acks) == ("applied", 4)
    assert command.who == "bob: root@console", "the key's name is not the client's to choose"


@pytest.mark.parametrize(
    "message",
    [Try("t", {"micro_batches": 2}, 8), Decide(keep=True), make_hello(1, 4), make_step(1, 9)],
    ids=lambda message: type(message).__name__,
)
def test_a_viewer_may_send_nothing_else(guarded: Guarded, opened: Opened, message: protocol.Message) -> None:
    watch(guarded, opened)
    peer = opened(Peer(guarded.url, guarded.viewer))
    peer.say(message)
    refused = peer.hear(Refused)
    assert isinstance(refused, Refused) and "the key ann has the role viewer" in refused.why


def test_a_rank_may_not_watch_nor_change(guarded: Guarded, opened: Opened) -> None:
    watch(guarded, opened)
    for message in (Credit(protocol.VERSION, "", 0, 8), Propose("by-a-rank", {"micro_batches": 1})):
        peer = opened(Peer(guarded.url, guarded.rank))
        peer.say(message)
        refused = peer.hear(Refused)
        assert isinstance(refused, Refused)
        assert refused.why.startswith("the key node has the role rank; watching requires")


def test_an_operator_cannot_act_as_a_rank(guarded: Guarded, opened: Opened) -> None:
    client = watch(guarded, opened)
    agent = opened(Agent(guarded.url, lambda: (0, "", 0.0), key=guarded.operator))
    agent.introduce(make_hello(0, 4, pid=1), None)
    wait(lambda: agent.refused, guarded.fleet.turn)
    assert agent.refused == "the key bob has the role operator; sending a hello requires the role rank"
    assert client.state.hellos[0].pid == os.getpid()


def test_an_unlisted_key_is_refused_with_the_reason(guarded: Guarded, opened: Opened, tmp_path: Path) -> None:
    watcher = watch(guarded, opened)
    other = load_key(KeyStore(tmp_path / "other").make("eve", Role.OPERATOR))
    eve = Key("eve", "operator", other.public, other.secret, guarded.viewer.hub)
    client = opened(Client(guarded.url, eve))
    poll_until(client, lambda: client.refused, guarded.fleet.turn)
    assert client.refused and "refuses the key eve: it is revoked or not listed there" in client.refused
    assert client.resets == 0
    turned = "a key that is not listed: refused, from 127.0.0.1"
    poll_until(watcher, lambda: any(turned in e.text for e in watcher.state.events), guarded.fleet.turn)


def test_the_screen_shows_why_updates_stopped(guarded: Guarded) -> None:
    """A cockpit is connected to the run. After the cockpit's key is revoked, its diagnosis line shows why updates
    stopped."""
    key = guarded.make("fay", Role.VIEWER)
    store = Store()
    source = LiveSource(guarded.url, key=key)
    source.start(store)
    try:
        wait(lambda: store.world == 4 and store.state.board, guarded.fleet.turn)
        guarded.store.revoke("fay")
        wait(lambda: store.refused, guarded.fleet.turn)
        said = diagnosis(store)
        assert (
            said.level is Level.BAD
            and "the key of this connection is no longer valid for watching" in said.text
        )
    finally:
        source.stop()


def test_a_refused_relay_reports_it_to_its_ranks(guarded: Guarded, opened: Opened, tmp_path: Path) -> None:
    path = guarded.store.make("relay-1", Role.RANK).rename(tmp_path / "relay-1.key")
    sockets = make_socket_directory()
    command = [
        sys.executable,
        "-m",
        "agents.hub.relay",
        "--run",
        "r",
        "--hub",
        guarded.url,
        "--key",
        str(path),
    ]
    guarded.store.revoke("relay-1")
    relay = subprocess.Popen(
        [*command, "--sockets", str(sockets)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    agent = opened(Agent(endpoints_in(sockets).ranks, lambda: (0, "", 0.0)))
    agent.introduce(make_hello(0, 4), None)
    try:
        wait(lambda: agent.refused)
        assert agent.refused and "refuses the key relay-1: it is revoked" in agent.refused
    finally:
        relay.terminate()
        said = relay.communicate(timeout=10)[1]
    assert said.startswith(f"the relay on {this_host()}: the hub at") and "relay-1" in said


def test_a_key_for_another_hub_is_reported(guarded: Guarded, opened: Opened, tmp_path: Path) -> None:
    key = load_key(KeyStore(tmp_path / "other").make("ann", Role.VIEWER))
    client = opened(Client(guarded.url, key))
    poll_until(client, lambda: client.refused)
    assert client.refused and f"{guarded.url} is not the hub for the key ann" in client.refused


def test_a_server_that_is_not_a_hub_is_reported(
    guarded: Guarded, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.transport.reconnecting.RECONNECT_S", 0.2)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as open_to_all:
        port = open_to_all.bind_to_random_port("tcp://127.0.0.1")
        client = opened(Client(f"tcp://127.0.0.1:{port}", guarded.viewer))
        poll_until(client, lambda: client.refused)
        assert client.refused and "or is not a hub" in client.refused
        client.close()
