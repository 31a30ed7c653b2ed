"""On SIGUSR1, a running job saves a checkpoint; the job's hub ignores the signals that a scheduler sends to all of the
job's processes."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from agents.rundir.runs import RECORD_FILE
from cockpit.cli.main import run as cockpit
from tests.ranks.launch.test_join import free_port
from tests.ranks.launch.test_run import TWO_RANKS, Live
from tests.ranks.program import Program


def test_a_signal_saves_a_checkpoint_and_training_continues(tmp_path: Path) -> None:
    live = Live(tmp_path / "run", *TWO_RANKS)
    try:
        live.until_step(2)
        live.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 60
        while not any(event["event"] == "checkpoint" for event in live.events):
            assert time.monotonic() < deadline, live.events
            assert live.next_event()
        step = next(event["step"] for event in live.events if event["event"] == "checkpoint")
        live.until_step(step + 2)
        assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == [f"step-{step}"]
        live.process.send_signal(signal.SIGTERM)
        assert live.rest() == 0
    finally:
        if live.process.poll() is None:
            live.process.kill()


def test_slurm_signals_every_process_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without cgroups, Slurm's signals reach the hub and the relays too. The run then ends with a complete
    recording."""
    run = tmp_path / "run"
    words = ["-m", "tests.ranks.launch.paced", "run", "layouts/demo.toml", "--json", "--run-dir", str(run)]
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "MASTER_PORT": free_port(),
        "COCKPIT_RELAY": "on",
    }
    tasks = [
        Program(
            *words,
            *TWO_RANKS,
            "checkpoint.every=1000",
            environ=os.environ | job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            errors=tmp_path / f"errors-{rank}",
        )
        for rank in range(2)
    ]
    try:
        events = []
        for line in tasks[0].stdout:
            events.append(json.loads(line))
            if events[-1].get("step") == 3:
                signal_all(tasks, signal.SIGUSR1)
            if events[-1]["event"] == "checkpoint":
                break
        signal_all(tasks, signal.SIGTERM)
        events += [json.loads(line) for line in tasks[0].stdout]
        assert [task.wait(60) for task in tasks] == [0, 0], (tmp_path / "errors-0").read_text()
    finally:
        for task in tasks:
            if task.poll() is None:
                task.kill()
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    last = [event["step"] for event in events if event["event"] == "step"][-1]
    assert len(saved) == 2 and saved[-1] == last + 1
    assert (run / RECORD_FILE).exists()
    assert cockpit(["runs", "--dir", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["state"], listed["steps"]) == ("ended", last + 1)


def signal_all(tasks: list[Program], number: signal.Signals) -> None:
    """Send a signal to the tasks and all their descendants, as Slurm does with ProctrackType=proctrack/linuxproc."""
    for task in tasks:
        process = psutil.Process(task.pid)
        for one in (process, *process.children(recursive=True)):
            one.send_signal(number)
