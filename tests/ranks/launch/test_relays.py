"""Ranks of two simulated nodes: each node has one connection to the hub, through its relay."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from agents.transport.curve_keys import KeyStore
from agents.transport.roles import Role
from tests.ranks.driver import JOIN, Driver, eventually, gone
from tests.ranks.launch.test_join import SPREAD, free_port

WORK = """
        from agents.protocol import VERSION, Hello
        from agents.rank.agent import Agent

        def work(context):
            dist = meet(context)
            agent = Agent(context.hub, lambda: (0, "", 0.0), key=context.key, fallback=context.fallback)
            hello = Hello(VERSION, "a-run", context.rank, 4, {}, "here", os.getpid(), "", "-", 0, 0, context.rank == 0)
            agent.introduce(hello, None)
            note(context, "hub", context.hub)
            note(context, "pid", os.getpid())
            while not context.stop_requested():
                time.sleep(0.02)
            dist.barrier()
            agent.close()
            dist.destroy_process_group()
        """


def _of_node(node: int, local_rank: int) -> dict[str, str]:
    """The environment variables that Slurm sets for a task of a job with 2 tasks on each of 2 nodes."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(2 * node + local_rank),
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": str(local_rank),
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_NODEID": str(node),
    }


@pytest.mark.parametrize(("setting", "connections"), [("auto", 1), ("off", 3)])
def test_each_node_has_one_connection_to_the_hub(
    driver: Driver, tmp_path: Path, setting: str, connections: int
) -> None:
    """Rank 0 and the relay of its node use a Unix socket of the hub; the connections over TCP are counted."""
    KeyStore(tmp_path / "keys").make("cluster", Role.RANK)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "COCKPIT_KEYS": str(tmp_path / "keys")}
    job["COCKPIT_RELAY"] = setting
    runs = [
        driver.start(WORK, tail=SPREAD, hub="auto", environ=_of_node(node, local_rank) | job)
        for node in range(2)
        for local_rank in range(2)
    ]
    pids = driver.pids(4)
    hubs = driver.notes("hub")
    behind_relays = [hubs[rank].startswith("ipc://") and "relay" in hubs[rank] for rank in range(4)]
    assert behind_relays == [setting == "auto"] * 4
    if setting == "auto":
        assert hubs[0] == hubs[1] != hubs[2] == hubs[3]
    hub = psutil.Process(json.loads((driver.run_dir / "hub.json").read_text())["pid"])
    relays = [
        one for pid in pids for one in psutil.Process(pid).children() if "agents.hub.relay" in one.cmdline()
    ]
    assert len(relays) == (2 if setting == "auto" else 0)

    def connected() -> int:
        return sum(one.status == psutil.CONN_ESTABLISHED for one in hub.net_connections("tcp"))

    eventually(lambda: connected() == connections)
    for pid in pids:
        psutil.Process(pid).send_signal(signal.SIGTERM)
    assert [driver.end(run) for run in runs] == [(0, "", "")] * 4
    assert all(gone(relay.pid) for relay in relays)
    if setting == "auto":
        assert not any(Path(hubs[rank].removeprefix("ipc://")).parent.exists() for rank in (0, 2))


def test_an_illegal_setting_ends_the_ranks_with_one_sentence(driver: Driver) -> None:
    run = driver.start(
        WORK,
        tail=JOIN,
        hub="auto",
        environ={
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "COCKPIT_RELAY": "always",
        },
    )
    status, _, err = driver.end(run)
    assert (status, err) == (2, "rank 0: COCKPIT_RELAY = 'always' is not legal; legal: auto, on, off\n")
