"""Node relays: which jobs use relays, and how ranks continue when the relay of their node cannot start, is killed, or
ends."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from agents.client import Client
from agents.protocol.base import RunError
from agents.rank.agent import Agent
from agents.rundir import node_relay
from agents.rundir.node_relay import place_of, through_relay, wants_relay
from agents.transport.reach import Reach
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import HubProcess, make_hello, make_step, poll_until

TORCHRUN = {"MASTER_ADDR": "n0", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "11", "SLURM_LOCALID": "2"}


def torchrun(local_rank: int, **more: str) -> dict[str, str]:
    sizes = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    return TORCHRUN | sizes | more


@pytest.mark.parametrize(
    ("environ", "auto", "on"),
    [
        (torchrun(0), True, True),
        (torchrun(0, WORLD_SIZE="2"), False, True),  # one node
        (torchrun(0, LOCAL_WORLD_SIZE="1"), False, True),  # one rank on each node
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, True, True),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "11", "SLURM_NODEID": "0"}, False, True),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "2"}, False, False),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, False, False),  # of which job?
        ({}, False, False),
    ],
)
def test_which_jobs_use_relays(environ: Mapping[str, str], auto: bool, on: bool) -> None:
    place = place_of(environ)
    wanted = [wants_relay(place, {"COCKPIT_RELAY": setting}) for setting in ("", "auto", "on", "off")]
    assert wanted == [auto, auto, on, False]


def test_an_illegal_setting_is_refused() -> None:
    with pytest.raises(RunError, match="COCKPIT_RELAY = 'yes' is not legal; legal: auto, on, off"):
        wants_relay(None, {"COCKPIT_RELAY": "yes"})


def test_only_the_ranks_of_one_node_of_one_start_share_a_socket() -> None:
    job = [
        torchrun(0),
        torchrun(1),
        torchrun(0, GROUP_RANK="0"),
        torchrun(0, TORCHELASTIC_RESTART_COUNT="1"),
        torchrun(0, MASTER_PORT="2"),
    ]
    first, second, *others = [place.job for environ in job if (place := place_of(environ))]
    assert first == second and len({first, *others}) == 4


class NodeOfTwo:
    """Two ranks of one node, both in this process, behind the relay that local rank 0 starts."""

    def __init__(self, hub: str) -> None:
        self._stack = ExitStack()
        direct = Reach(hub)
        reached = [self._stack.enter_context(through_relay(direct, "r", torchrun(rank))) for rank in range(2)]
        self.socket = Path(reached[0].endpoint.removeprefix("ipc://")) if reached[0] else Path()
        assert all(one and one.endpoint == reached[0].endpoint != hub for one in reached if reached[0])
        self.agents = [
            Agent(one.endpoint, lambda: (0, "", 0.0), fallback=one.fallback) for one in reached if one
        ]
        for rank, agent in enumerate(self.agents):
            agent.introduce(make_hello(rank, 2), None)

    def relays(self) -> list[psutil.Process]:
        """The relay processes of this node."""
        children = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
        return [child for child in children if "agents.hub.relay" in child.cmdline()]

    def send(self) -> None:
        """Send a step record from each rank. The first records on a new connection may be lost."""
        for rank, agent in enumerate(self.agents):
            agent.send(make_step(rank, 7))

    def end_relay(self) -> None:
        self._stack.close()

    def close(self) -> None:
        for agent in self.agents:
            agent.close(0.0)
        self._stack.close()


@pytest.fixture(autouse=True)
def short_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test its own torchrun run ID, so that tests that run at the same time have their sockets in different
    folders."""
    monkeypatch.setitem(TORCHRUN, "TORCHELASTIC_RUN_ID", str(tmp_path))


def test_a_killed_relay_is_restarted_and_its_ranks_stay_behind_it(
    own_hub: HubProcess, opened: Opened
) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    node = opened(NodeOfTwo(own_hub.endpoints.ranks))
    poll_until(client, lambda: len(client.state.hellos) == 2)
    relay = node.relays()[0]
    relay.kill()
    poll_until(client, lambda: any(one.pid != relay.pid for one in node.relays()))
    poll_until(client, lambda: len(client.state.steps) == 2, node.send)
    assert not any("directly" in event.text for event in client.state.events)
    for agent in node.agents:
        agent.close()
    poll_until(client, lambda: len(client.state.gone) == 2)
    assert all(gone.clean for gone in client.state.gone.values())


def test_ranks_connect_directly_if_the_relay_cannot_start(
    own_hub: HubProcess, opened: Opened, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The relay's program exits immediately each time it is started."""
    monkeypatch.setattr(
        node_relay, "command_of", lambda *_: [sys.executable, "-c", "raise SystemExit('no key')"]
    )
    client = opened(Client(own_hub.endpoints.clients))
    node = opened(NodeOfTwo(own_hub.endpoints.ranks))
    poll_until(client, lambda: len(client.state.hellos) == 2 and client.state.events)
    said = [event for event in client.state.events if "relay" in event.text]
    assert [(event.source, event.level) for event in said] == [("rank 0", "warning")]
    assert "the ranks of the node connect to the hub directly" in said[0].text
    assert "its ranks connect to the hub directly: no key\n" in capfd.readouterr().err
    assert not node.socket.parent.exists() and not node.relays()


def test_ranks_that_outlive_local_rank_0_connect_directly(own_hub: HubProcess, opened: Opened) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    node = opened(NodeOfTwo(own_hub.endpoints.ranks))
    poll_until(client, lambda: len(client.state.hellos) == 2)
    node.end_relay()
    assert not node.relays() and not node.socket.parent.exists()
    poll_until(client, lambda: any("directly" in event.text for event in client.state.events))
    poll_until(client, lambda: len(client.state.steps) == 2, node.send)
