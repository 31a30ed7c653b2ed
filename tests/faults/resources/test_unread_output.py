"""A run whose output nobody reads: both standard streams lead to a pipe that is full from the start."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agents.client import Client
from agents.rundir.hub_file import read_hub_file
from agents.rundir.runs import RunError
from engine.launch.processes.standard_output import LOG
from tests.ranks.driver import eventually
from tests.unit.agents.fleet import environment, poll_until

DEMO = str(Path(__file__).parents[3] / "layouts/demo.toml")
TWO_RANKS = ["grid.pp=1", "grid.dp_shard=1", "grid.ep=2", "train.global_batch=8", "knobs.micro_batches=1"]
SMALL = [*TWO_RANKS, "model.layers=1", "model.moe.shared_experts=0", "train.steps=1000000"]


@contextmanager
def unread(*words: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Run `engine` with the words, and yield its process and the read end of the full pipe."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, 4095 * b"." + b"\n")
    command = [sys.executable, "-m", "engine", *words]
    process = subprocess.Popen(command, env=environment(), stdout=writer, stderr=writer)
    os.close(writer)
    try:
        yield process, reader
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(reader)


def until(run: Path, holds: Callable[[Client], object]) -> None:
    """Wait until the condition holds for a client of the run."""

    def hub_listens() -> bool:
        try:
            return bool(read_hub_file(run))
        except RunError:
            return False

    eventually(hub_listens, 60)
    client = Client(read_hub_file(run).endpoints.clients)
    try:
        poll_until(client, lambda: holds(client))
    finally:
        client.close()


def last_step(client: Client) -> int:
    return client.state.summaries[-1].step if client.state.summaries else -1


def lines_of(reader: int) -> list[str]:
    """The rest of a pipe's content, without the first line."""
    os.set_blocking(reader, True)
    with os.fdopen(os.dup(reader)) as file:
        return file.read().splitlines()[1:]


def records(lines: Sequence[str], event: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [record for record in found if record["event"] == event]


def test_a_simulated_run_goes_on_and_tells_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["simulate", DEMO, "--json", "--speed", "max", "--steps", "1000000", "--run-dir", str(run)]
    with unread(*words) as (process, reader):
        until(run, lambda client: any("nobody reads" in event.text for event in client.state.events))
        until(run, lambda client: last_step(client) > 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        read = lines_of(reader)
    log = (run / LOG).read_text().splitlines()
    logged = records(log, "step")
    assert [step["step"] for step in logged] == list(range(len(logged))) and len(logged) > 200
    told = [line for line in log if line.startswith("nobody reads standard output: the run")]
    assert len(told) == 1 and str(run / LOG) in told[0]
    assert all(json.loads(line) for line in read if line.startswith("{")), "lines are whole"


def test_training_goes_on_saves_and_stops(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with unread("run", DEMO, *SMALL, "--json", "--run-dir", str(run)) as (process, _):
        until(run, lambda client: last_step(client) >= 3)
        save = [sys.executable, "-m", "cockpit", "set", "save", "--wait", "--json", "--run", str(run)]
        saved = subprocess.run(save, env=environment(), capture_output=True, timeout=60)
        assert json.loads(saved.stdout)["state"] == "applied"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    log = (run / LOG).read_text().splitlines()
    steps, saves = records(log, "step"), records(log, "checkpoint")
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert [save["why"] for save in saves] == [None, None] and saves[-1]["step"] == len(steps)
    assert records(log, "end")[0]["exit"] == 0


def test_an_end_without_a_checkpoint_is_a_failure(tmp_path: Path) -> None:
    """A stop signal requests a checkpoint; if it cannot be saved, the exit status is 1."""
    run = tmp_path / "run"
    with unread("run", DEMO, *SMALL, "--json", "--run-dir", str(run)) as (process, _):
        until(run, lambda client: last_step(client) >= 0)
        (run / "checkpoints" / ".lock").unlink()
        (run / "checkpoints").rmdir()
        (run / "checkpoints").touch()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
    log = (run / LOG).read_text().splitlines()
    assert records(log, "checkpoint")[0]["why"] and records(log, "end")[0]["exit"] == 1
    assert "the exit status is 1, because the last checkpoint was not saved" in log
