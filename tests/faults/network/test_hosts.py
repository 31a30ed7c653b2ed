"""Several machines: ranks and cockpits connect to a hub on another machine over TCP with a key, and the network may
fail.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.client import Client
from agents.protocol.base import RunError
from agents.rundir.hub_file import HUB_FILE, read_hub_file
from agents.transport.addresses import own_address
from agents.transport.curve_keys import Key, KeyStore, load_key
from agents.transport.roles import Role
from agents.waiting import wait_for_command
from tests.faults.conftest import Opened
from tests.faults.guarded import wait
from tests.faults.hosts import Host, NoHosts, two_hosts
from tests.unit.agents.fleet import SOURCE, Fleet, poll_until

LOOPING = SOURCE / "tests/unit/agents/loop/looping.py"

pytestmark = pytest.mark.xdist_group("hosts")  # its tests share a fixture


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    made = two_hosts()
    try:
        pair = made.__enter__()
        with pair[0].inside():
            pass
    except NoHosts as why:
        pytest.skip(f"no network namespaces: {why}")
    yield pair
    made.__exit__(None, None, None)


@pytest.fixture
def keys(tmp_path: Path) -> dict[Role, Key]:
    store = KeyStore(tmp_path / "keys")
    return {role: load_key(store.make(f"the-{role}", role)) for role in Role}


@pytest.fixture
def url(hosts: tuple[Host, Host], keys: dict[Role, Key], tmp_path: Path) -> Iterator[str]:
    """The URL of a hub on the first host."""
    options = ["--run", "r", "--dir", str(tmp_path / "run"), "--keys", str(tmp_path / "keys")]
    listen = ["--listen", f"tcp://{hosts[0].address}:auto"]
    command = hosts[0].command(sys.executable, "-m", "agents.hub", *options, *listen)
    hub = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(SOURCE)})
    deadline = time.monotonic() + 15
    while not (tmp_path / "run" / HUB_FILE).exists():
        assert time.monotonic() < deadline and hub.poll() is None
        time.sleep(0.02)
    listening = read_hub_file(tmp_path / "run").tcp
    assert listening is not None
    yield listening.ranks
    hub.terminate()
    assert hub.wait(10) == 0


def test_a_run_on_another_machine_is_watched_and_steered(
    hosts: tuple[Host, Host], url: str, keys: dict[Role, Key], opened: Opened
) -> None:
    with hosts[1].inside():
        fleet = opened(Fleet(url, key=keys[Role.RANK]))
        client = opened(Client(url, keys[Role.OPERATOR]))
        poll_until(client, lambda: len(client.state.steps) == 4 and client.state.board, fleet.turn)
        asked = client.propose({"micro_batches": 8})
        poll_until(client, lambda: (c := client.state.commands.get(asked)) and c.settled, fleet.turn)
        assert wait_for_command(client, asked, 1.0).acks == 4


def test_a_link_goes_down_and_up(
    hosts: tuple[Host, Host],
    url: str,
    keys: dict[Role, Key],
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heartbeats detect the dead connection, so that a new connection is opened as soon as the network works again."""
    monkeypatch.setattr("agents.transport.reconnecting.HEARTBEAT_MS", 100)
    monkeypatch.setattr("agents.transport.reconnecting.DEAD_AFTER_MS", 500)
    with hosts[1].inside():
        fleet = opened(Fleet(url, key=keys[Role.RANK]))
        client = opened(Client(url, keys[Role.VIEWER]))
        poll_until(client, lambda: len(client.state.steps) == 4, fleet.turn)
        hosts[1].plug("down")
        poll_until(client, lambda: (client.age_s or 0.0) > 2.0, fleet.turn)
        trained = fleet.step
        hosts[1].plug("up")
        back = time.monotonic()
        poll_until(client, lambda: client.state.steps[3].step > trained, fleet.turn)
        assert time.monotonic() - back < 10
        assert client.refused is None and trained > 20, "and training continued in the meantime"


def test_the_address_for_other_machines(hosts: tuple[Host, Host]) -> None:
    with hosts[0].inside():
        assert own_address(hosts[0].address) == hosts[0].address
        assert own_address(hosts[1].address) == hosts[0].address
        with pytest.raises(RunError, match="which other machines cannot reach"):
            own_address("127.0.0.1")


JOINED = """
import sys
from pathlib import Path
from engine.launch.processes.torchrun import join, context_from_environment
folder = Path(sys.argv[1])

def work(context):
    (folder / f"hub.{context.rank}").write_text(f"{context.hub} {context.key.name if context.key else None}")
    context.store().add("seen", 1)
    while context.store().add("seen", 0) < context.world:
        pass

sys.exit(join(context_from_environment(folder / "run"), work, name_of_rank=str, hub="auto", run="r"))
"""


def test_rank_0_shares_its_hubs_address(
    hosts: tuple[Host, Host], keys: dict[Role, Key], tmp_path: Path
) -> None:
    """No option is given: rank 0 finds its address and publishes the endpoint, and the key is read from the shared
    folder.
    """
    script = tmp_path / "joined.py"
    script.write_text(JOINED)
    with hosts[0].inside(), socket.create_server((hosts[0].address, 0)) as free:
        port = str(free.getsockname()[1])
    ranks = []
    for rank, host in enumerate(hosts):
        environ = {
            "PYTHONPATH": str(SOURCE),
            "COCKPIT_KEYS": str(tmp_path / "keys"),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": port,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        command = host.command(sys.executable, str(script), str(tmp_path))
        ranks.append(subprocess.Popen(command, env=os.environ | environ, stderr=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert (tmp_path / "hub.0").read_text().startswith("ipc://")
    there = (tmp_path / "hub.1").read_text()
    assert there.startswith(f"tcp://{hosts[0].address}:") and there.endswith(" the-rank")


@pytest.mark.exhaustive
def test_two_machines_with_the_same_name_and_folders_of_their_own(
    hosts: tuple[Host, Host], keys: dict[Role, Key], tmp_path: Path, opened: Opened
) -> None:
    """Both ranks report the same host name. On the second machine, the directory of the hub's sockets is empty."""
    sockets = tmp_path / "sockets"
    sockets.mkdir(mode=0o700)
    environ = {
        "PYTHONPATH": str(SOURCE),
        "COCKPIT_KEYS": str(tmp_path / "keys"),
        "XDG_RUNTIME_DIR": str(sockets),
        "MASTER_ADDR": hosts[0].address,
    }
    with hosts[0].inside(), socket.create_server((hosts[0].address, 0)) as free:
        port = str(free.getsockname()[1])
    ranks = []
    for rank, host in enumerate(hosts):
        words = [sys.executable, str(LOOPING), str(rank), "2", str(tmp_path), port, "agree"]
        if rank == 1:
            words = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {sockets} && exec "$@"', "sh", *words]
        ranks.append(subprocess.Popen(host.command(*words), env=os.environ | environ))
    try:
        folder = tmp_path / "somebody"
        wait((folder / HUB_FILE).exists)
        client = opened(Client(read_hub_file(folder).endpoints.clients))
        poll_until(client, lambda: len(client.state.steps) == 2)
        assert len({hello.host for hello in client.state.hellos.values()}) == 1, "one kernel, in this test"
        (tmp_path / "stop").touch()
        assert [rank.wait(30) for rank in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
