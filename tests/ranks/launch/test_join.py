"""Ranks that torchrun or Slurm has started."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from agents.transport.curve_keys import KeyStore
from agents.transport.roles import Role
from engine.launch.processes.torchrun import context_from_environment
from tests.ranks.driver import JOIN, Driver, eventually, gone

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_ranks_of_torchrun_with_a_hub(driver: Driver) -> None:
    run = driver.start(
        """
        def work(context):
            dist = meet(context)
            note(context, "pid", os.getpid())
            note(context, "context", json.dumps([context.world, context.local_rank, context.local_world, context.hub]))
            while not context.stop_requested():
                time.sleep(0.02)
            dist.destroy_process_group()
            note(context, "finished")
        """,
        tail=JOIN,
        python=TORCHRUN,
        hub="auto",
    )
    eventually(lambda: len(driver.notes("context")) == 2)
    eventually((driver.run_dir / "hub.json").exists)
    contexts = {rank: json.loads(text) for rank, text in driver.notes("context").items()}
    hub = json.loads((driver.run_dir / "hub.json").read_text())
    ranks = hub["endpoints"]["ranks"]
    assert contexts == {0: [2, 0, 2, ranks], 1: [2, 1, 2, ranks]}
    for pid in driver.pids(2):
        os.kill(pid, signal.SIGTERM)
    status, _, err = driver.end(run)
    assert (status, set(driver.notes("finished"))) == (0, {0, 1}), err
    assert "Traceback" not in err
    assert gone(hub["pid"])


@pytest.mark.exhaustive
def test_a_failure_under_torchrun(driver: Driver) -> None:
    run = driver.start(
        """
        def work(context):
            note(context, "pid", os.getpid())
            context.set_operation(5, "pp receive")
            if context.rank == 1:
                raise ValueError("mine")
            steps(context)
        """,
        tail=JOIN,
        python=TORCHRUN,
    )
    status, out, err = driver.end(run)
    assert (status, out) == (1, "on_failure was called\n")
    assert "\nrank 1 (dp1) failed at step 5 in pp receive: ValueError: mine\nTraceback" in f"\n{err}"


def test_no_rank_outlives_a_killed_torchrun(driver: Driver) -> None:
    run = driver.start(
        """
        def work(context):
            note(context, "pid", os.getpid())
            time.sleep(60)
        """,
        tail=JOIN,
        python=TORCHRUN,
    )
    eventually(lambda: len(driver.notes("pid")) == 2)
    run.kill()
    # Ranks that are not stopped sleep for 60 s.
    eventually(lambda: all(gone(pid) for pid in driver.pids(2)), 30)


def test_ranks_of_slurm(driver: Driver) -> None:
    work = """
        def work(context):
            import torch
            dist = meet(context)
            total = torch.ones(1)
            dist.all_reduce(total)
            note(context, "total", int(total))
            dist.destroy_process_group()
            if context.rank:
                time.sleep(1)
                context.store().add("late", 1)
        """
    port = free_port()
    runs = [
        driver.start(
            work, tail=JOIN, environ=_slurm(rank) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        )
        for rank in range(2)
    ]
    assert [driver.end(run) for run in runs] == [(0, "", ""), (0, "", "")]
    assert driver.notes("total") == {0: "2", 1: "2"}


def free_port() -> str:
    """A port for a server that a rank starts later. The port is below the range from which the system chooses ports for
    outgoing connections (from 32,768 on Linux), so that no connection of another test takes it before the server
    starts."""
    while True:
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)


def _slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }


SPREAD = JOIN.replace('run="a-run",', 'run="a-run", listen="tcp://127.0.0.1:auto",')
NOTE_HUB = """
        def work(context):
            dist = meet(context)
            note(context, "hub", f"{context.hub} {context.key.name if context.key else None}")
            dist.barrier()
            dist.destroy_process_group()
        """


def _two_machines(
    driver: Driver, keys: Path, tail: str = SPREAD, second: dict[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start one rank on each of two simulated machines, as Slurm does. `second` contains additional environment
    variables for the second rank."""
    port = free_port()
    spread = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "COCKPIT_KEYS": str(keys),
    }
    environs = [spread, spread | (second or {})]
    return [
        driver.start(
            NOTE_HUB, tail=tail, hub="auto", environ=_slurm(rank) | environ | {"SLURM_NODEID": str(rank)}
        )
        for rank, environ in enumerate(environs)
    ]


def test_ranks_of_two_machines_connect_to_one_hub_with_a_key(driver: Driver, tmp_path: Path) -> None:
    KeyStore(tmp_path / "keys").make("cluster", Role.RANK)
    ended = [driver.end(run) for run in _two_machines(driver, tmp_path / "keys")]
    assert [status for status, _, _ in ended] == [0, 0], ended
    hubs = driver.notes("hub")
    assert hubs[0].startswith("ipc://") and hubs[0].endswith(" None")
    assert hubs[1].startswith("tcp://127.0.0.1:") and hubs[1].endswith(" cluster")


@pytest.mark.parametrize(
    ("key", "sentence"),
    [("absent.key", "absent.key cannot be read: No such file"), ("theirs.key", "is a key for another hub")],
)
def test_a_rank_without_the_key_refuses_in_one_sentence(
    driver: Driver, tmp_path: Path, key: str, sentence: str
) -> None:
    KeyStore(tmp_path / "keys").make("cluster", Role.RANK)
    KeyStore(tmp_path / "other").make("theirs", Role.RANK)
    first, second = _two_machines(
        driver, tmp_path / "keys", second={"COCKPIT_KEY": str(tmp_path / "other" / key)}
    )
    status, _, err = driver.end(second)
    assert status == 2 and err.startswith("rank 1: ") and sentence in err and err.count("\n") == 1
    first.kill()  # torchrun and Slurm also kill the other ranks


def test_no_key_no_hub_between_machines(driver: Driver, tmp_path: Path) -> None:
    ended = [driver.end(run) for run in _two_machines(driver, tmp_path / "none", JOIN)]
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert driver.notes("hub") == {0: "None None", 1: "None None"}
    warning = (
        "the ranks are on several machines, and the run has no hub: this hub requires a key of role rank"
    )
    assert ended[0][2].startswith(warning) and "cockpit keys make NAME --role rank" in ended[0][2]
    assert ended[1][2] == ""


MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN_ENVIRON = MASTER | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (TORCHRUN_ENVIRON, (5, 8, 1, 4)),
        (_slurm(1) | MASTER, (1, 2, 1, 2)),
        (
            _slurm(1)
            | MASTER
            | {"SLURM_NTASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "1"},
            (1, 9, 1, 4),
        ),
        (_slurm(0) | {"SLURM_NTASKS": "1"}, None),  # an interactive shell, which is a step with one task
        # A batch script, which srun has not started.
        ({k: v for k, v in _slurm(0).items() if k != "SLURM_STEP_ID"}, None),
    ],
)
def test_context_from_environment(
    tmp_path: Path, environ: dict[str, str], expected: tuple[int, int, int, int] | None
) -> None:
    context = context_from_environment(tmp_path, environ)
    assert expected == (context and (context.rank, context.world, context.local_rank, context.local_world))


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (_slurm(1), "MASTER_ADDR and MASTER_PORT"),
        (TORCHRUN_ENVIRON | {"LOCAL_RANK": ""}, "LOCAL_RANK"),
        (TORCHRUN_ENVIRON | {"WORLD_SIZE": "many"}, "WORLD_SIZE = 'many'"),
        (TORCHRUN_ENVIRON | {"MASTER_PORT": "70000"}, "MASTER_PORT = 70000"),
        (TORCHRUN_ENVIRON | {"RANK": "8"}, "rank 8 of 8"),
        (_slurm(1) | MASTER | {"SLURM_NODEID": "3"}, "SLURM_NODEID = 3"),
        ({"RANK": "1"}, "RANK = '1' is set without the other"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE = '4' is set without the other"),
    ],
)
def test_an_incomplete_environment_is_refused_in_one_sentence(
    tmp_path: Path, environ: dict[str, str], named: str
) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refusal:
        context_from_environment(tmp_path, environ)
    assert named in str(refusal.value)
