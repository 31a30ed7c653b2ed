"""Messages of many parts, which libzmq holds before anybody can refuse them: a hub starts again, and stays small."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from agents.reach import runs
from tests.faults.conftest import Opened
from tests.faults.guarded import Guarded, wait, watch
from tests.unit.agents.fleet import Peer, poll_until

MIB = 1 << 20
MOST_MB = 128
PART = bytes(MIB - 4096)  # with its encryption still a part that may be


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Guarded]:
    """A hub that may hold little."""
    guarded = Guarded(tmp_path, options=("--memory-mb", str(MOST_MB)))
    yield guarded
    guarded.close()


def test_a_message_of_many_parts_costs_no_more_memory_than_a_hub_may_have(
    small: Guarded, opened: Opened
) -> None:
    """It starts again, as the same process at the same address, and knows what it had accepted."""
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
    file = runs.read_hub_file(small.hub.folder)
    assert (file.pid, file.tcp and file.tcp.clients) == (pid, small.url)
    poll_until(
        client, lambda: any("--memory-mb" in one.text for one in client.state.events), small.fleet.turn
    )
