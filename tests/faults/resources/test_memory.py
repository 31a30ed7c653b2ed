"""The hub limits two resources that its peers could exhaust: memory, because libzmq buffers all parts of a message
before the hub can refuse it, and file descriptors, because each connection uses them.
"""

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from agents.client import Client
from agents.rundir.hub_file import read_hub_file
from agents.transport.admission import RESERVE_TCP
from tests.faults.conftest import Opened
from tests.faults.guarded import Guarded, wait, watch
from tests.unit.agents.fleet import Peer, poll_until

MIB = 1 << 20
MOST_MB = 128
PART = bytes(MIB - 4096)  # legal as a part even with the overhead of encryption


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Guarded]:
    """A hub with a low memory limit."""
    guarded = Guarded(tmp_path, options=("--memory-mb", str(MOST_MB)))
    yield guarded
    guarded.close()


def test_a_message_of_many_parts_stays_within_the_memory_limit(small: Guarded, opened: Opened) -> None:
    """The hub restarts with the same process id and the same address, and still has all accepted commands."""
    client = watch(small, opened, small.operator)
    before = client.propose({"micro_batches": 8})
    poll_until(
        client,
        lambda: before in client.state.commands and client.state.commands[before].settled,
        small.fleet.turn,
    )
    epoch, pid = client.epoch, small.hub.process.pid
    intruder = opened(Peer(small.url, small.viewer))
    for _ in range(3 * MOST_MB):
        intruder.dealer.send(PART, zmq.SNDMORE)
    intruder.dealer.send(b"")
    poll_until(client, lambda: client.epoch not in ("", epoch), small.fleet.turn)
    intruder.close()
    poll_until(
        client, lambda: before in client.state.commands and len(client.state.hellos) == 4, small.fleet.turn
    )
    assert client.state.commands[before].state == "applied"
    wait(lambda: psutil.Process(pid).memory_info().rss < MOST_MB * MIB, small.fleet.turn)
    file = read_hub_file(small.hub.folder)
    assert (file.pid, file.tcp and file.tcp.clients) == (pid, small.url)
    poll_until(
        client, lambda: any("--memory-mb" in one.text for one in client.state.events), small.fleet.turn
    )


def test_connections_leave_a_reserve_of_descriptors(tmp_path: Path, opened: Opened) -> None:
    """Without free descriptors, libzmq would retry in a busy loop, and the hub could not read the list of keys."""
    guarded = Guarded(tmp_path)
    strangers: list[socket.socket] = []
    try:
        pid = guarded.hub.process.pid
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (256, 256))
        client = watch(guarded, opened)
        for _ in range(300):
            with contextlib.suppress(OSError):
                strangers.append(guarded.connect())
        hub = psutil.Process(pid)
        wait(lambda: hub.num_fds() <= 256 - RESERVE_TCP, guarded.fleet.turn)
        local = opened(Client(guarded.hub.endpoints.clients))
        poll_until(local, lambda: len(local.state.hellos) == 4, guarded.fleet.turn)
        poll_until(
            client,
            lambda: any("too many files open (ulimit -n)" in one.text for one in client.state.events),
            guarded.fleet.turn,
        )
        assert client.refused is None and client.resets == 1
        for stranger in strangers:
            stranger.close()
        watch(guarded, opened, guarded.operator)
    finally:
        for stranger in strangers:
            stranger.close()
        guarded.close()
