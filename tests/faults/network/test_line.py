"""The hub and the agents close dead connections, and connections on which the peer sends nothing or too much."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from agents import protocol
from agents.protocol import Credit, Updates
from agents.transport.authenticator import ZapAuthenticator
from agents.transport.curve_keys import Key, KeyStore, load_key
from agents.transport.reconnecting import ReconnectingSocket
from agents.transport.roles import Role
from agents.transport.server_sockets import CurveSocket
from tests.faults.conftest import Opened
from tests.faults.forwarder import Forwarder
from tests.faults.guarded import Guarded, wait
from tests.unit.agents.fleet import DEADLINE_S, Peer

pytestmark = pytest.mark.xdist_group("line")  # its tests share a fixture

HASTY = {
    "agents.transport.server_sockets.HEARTBEAT_MS": 100,
    "agents.transport.server_sockets.DEAD_AFTER_MS": 500,
    "agents.transport.server_sockets.HANDSHAKE_MS": 500,
}


def line_to(endpoint: str, key: Key | None = None) -> ReconnectingSocket:
    return ReconnectingSocket(endpoint, key, immediate=True, high_water=8, reconnect_max_ms=200)


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A hub with short connection timeouts."""
    guarded = Guarded(tmp_path_factory.mktemp("hasty"), HASTY)
    yield guarded
    guarded.close()


def connections(guarded: Guarded) -> int:
    hub = psutil.Process(guarded.hub.process.pid)
    return sum(one.status == psutil.CONN_ESTABLISHED for one in hub.net_connections("tcp"))


def test_a_hub_drops_a_peer_whose_machine_vanished(hasty: Guarded, opened: Opened) -> None:
    """A machine that loses power or its network does not close its connections; only heartbeats detect this."""
    wait(lambda: connections(hasty) == 4)
    cable = opened(Forwarder(hasty.url))
    peer = opened(Peer(cable.endpoint, hasty.viewer))
    peer.say(Credit(protocol.VERSION, "", 0, 1))
    assert isinstance(peer.hear(Updates), Updates)
    wait(lambda: connections(hasty) == 5)
    cable.cut()
    wait(lambda: connections(hasty) == 4)


def test_a_hub_drops_a_peer_without_a_handshake(hasty: Guarded) -> None:
    with hasty.connect() as stranger:
        stranger.settimeout(20)  # without heartbeats, libzmq would wait for half a minute
        while stranger.recv(4096):
            pass


def test_a_client_socket_drops_a_hub_whose_machine_vanished(
    hasty: Guarded, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.transport.reconnecting.HEARTBEAT_MS", 100)
    monkeypatch.setattr("agents.transport.reconnecting.DEAD_AFTER_MS", 500)
    cable = opened(Forwarder(hasty.url))
    line = opened(line_to(cable.endpoint, hasty.viewer))

    def happened(event: int) -> bool:
        monitor = line._monitor
        assert monitor is not None
        return bool(monitor.poll(0)) and recv_monitor_message(monitor)["event"] == event

    wait(lambda: happened(zmq.EVENT_HANDSHAKE_SUCCEEDED))
    cable.cut()
    wait(lambda: happened(zmq.EVENT_DISCONNECTED))


def test_an_oversized_frame_of_a_hub_is_never_buffered(opened: Opened, tmp_path: Path) -> None:
    """libzmq closes the connection when it reads the length, even if the peer is a hub."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.set(zmq.LINGER, 0)
        other.bind(f"ipc://{tmp_path / 'other'}")
        line = opened(line_to(f"ipc://{tmp_path / 'other'}"))
        monitor = line.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        assert line.socket.poll(int(1000 * DEADLINE_S), zmq.POLLOUT)
        line.socket.send(b"here")
        identity, _ = other.recv_multipart()
        other.send_multipart([identity, bytes(protocol.MAX_FRAME_BYTES)])
        assert (
            line.socket.poll(int(1000 * DEADLINE_S)) and len(line.socket.recv()) == protocol.MAX_FRAME_BYTES
        )
        other.send_multipart([identity, bytes(protocol.MAX_FRAME_BYTES + 1)])
        try:
            wait(lambda: monitor.poll(0) or line.socket.poll(0))
            assert not line.socket.poll(0)
        finally:
            line.socket.disable_monitor()
            monitor.close(0)


def test_without_an_authenticator_no_peer_is_admitted(opened: Opened, tmp_path: Path) -> None:
    """CURVE without ZAP accepts any key, so the authenticator must be running."""
    store = KeyStore(tmp_path / "keys")
    own = store.hub_key()
    key = load_key(store.make("ann", Role.VIEWER))
    with zmq.Context() as context:
        server_socket = CurveSocket(context, b"t", cast(ZapAuthenticator, None), own.secret)
        url = server_socket.bind("tcp://127.0.0.1:*")
        peer = opened(Peer(url, key))
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        monitor = peer.dealer.get_monitor_socket(events)
        try:
            assert monitor.poll(int(1000 * DEADLINE_S))
            assert recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
        finally:
            peer.dealer.disable_monitor()
            monitor.close(0)
            server_socket.socket.close(0)
