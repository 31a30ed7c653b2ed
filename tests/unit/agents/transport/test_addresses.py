"""Addresses on which a hub may listen, and to which a peer may connect."""

from pathlib import Path

import pytest
import zmq

from agents.protocol.base import RunError
from agents.rundir.socket_directory import endpoints_in, make_socket_directory, remove_sockets
from agents.transport import server_sockets
from agents.transport.addresses import connect_address, listen_address
from agents.transport.curve_keys import KeyStore


def test_legal_listen_addresses() -> None:
    assert listen_address("auto") == ("127.0.0.1", 0)
    assert listen_address("tcp://10.0.0.1:auto") == ("10.0.0.1", 0)
    assert listen_address("tcp://[::1]:5555") == ("[::1]", 5555)
    for every in (
        "tcp://*:5555",
        "tcp://0.0.0.0:5555",
        "tcp://0:auto",
        "tcp://[::]:1",
        "tcp://[0:0::0]:auto",
        "tcp://[::ffff:0.0.0.0]:5555",
        "tcp://[::ffff:0:0]:auto",
        "tcp://[::0.0.0.0]:auto",
        "tcp://0.0x0:auto",
        "tcp://000.0:auto",
    ):
        with pytest.raises(RunError, match="every address of this machine, which is not allowed"):
            listen_address(every)
    for wrong in ("tcp://host", "tcp://host:0", "tcp://host:65536", "ipc:///x", "tcp://a b:1", "5555", ""):
        with pytest.raises(
            RunError, match=r"is not a TCP address; legal|has the port \d+; legal: 1 to 65535"
        ):
            listen_address(wrong)


def test_a_host_name_of_every_address_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(place: str) -> tuple[str, int]:
        return ("0.0.0.0", 0) if place == "tcp://everywhere:auto" else listen_address(place)

    monkeypatch.setattr(server_sockets, "listen_address", resolved)
    sockets = endpoints_in(make_socket_directory())
    with zmq.Context() as context:
        try:
            with pytest.raises(
                RunError, match=r"tcp://everywhere:auto is the same as tcp://0.0.0.0:\d+ would listen on"
            ):
                server_sockets.ServerSockets(
                    context, sockets, ["tcp://everywhere:auto"], KeyStore(tmp_path / "keys")
                )
        finally:
            context.destroy(0)
            remove_sockets(sockets)


def test_legal_connect_addresses() -> None:
    assert connect_address("tcp://node-1.cluster:5555") == "tcp://node-1.cluster:5555"
    for wrong in (
        "tcp://*:5555",
        "tcp://0.0.0.0:1",
        "tcp://[::ffff:0.0.0.0]:1",
        "tcp://host:auto",
        "tcp://host:0",
        "tcp://host:5555;tcp://x:1",
    ):
        with pytest.raises(RunError, match="legal"):
            connect_address(wrong)
