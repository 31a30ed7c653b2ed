"""Tests of `engine simulate` as a process with its hub: knob changes, a killed hub, error messages, the label
SIMULATED."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from agents.client import Client
from agents.rundir.hub_file import HubFile, read_hub_file
from agents.rundir.runs import RunError
from agents.waiting import wait_for_command
from tests.unit.agents.fleet import environment, poll_until
from tests.unit.engine.simulate.simulated import LAYOUT

NO_TORCH = """
import sys
import time
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("no torch here", name="torch")
sys.meta_path.insert(0, NoTorch())
from engine.__main__ import main
main()
"""


def simulate(folder: Path, *arguments: str) -> list[str]:
    (folder / "layout.toml").write_text(LAYOUT)
    where = ["--run-dir", str(folder / "run")]
    return [sys.executable, "-c", NO_TORCH, "simulate", str(folder / "layout.toml"), *where, *arguments]


def printed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(simulate(folder, *arguments), env=environment(), capture_output=True, text=True)


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Client]]:
    """Starts `engine simulate`, and yields its process and a client that is connected to its hub."""
    with ExitStack() as stack:
        command = simulate(folder, *arguments)
        process = stack.enter_context(subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL))
        stack.callback(process.kill)
        client = stack.enter_context(closing(Client(hub(folder).endpoints.clients)))
        poll_until(client, lambda: len(client.state.hellos) == 32 and client.state.summaries)
        yield process, client


def hub(folder: Path, after: str = "") -> HubFile:
    """Wait until hub.json describes a hub whose epoch differs from `after`, and return its content."""
    for _ in range(600):
        try:
            found = read_hub_file(folder / "run")
            if found.epoch != after:
                return found
        except RunError:
            pass
        time.sleep(0.05)
    raise AssertionError("no hub started")


# ------------------------------------------------------------------------------------------ without a hub


def test_it_prints_what_a_run_prints_and_that_it_is_simulated(tmp_path: Path) -> None:
    done = printed(tmp_path, "--steps", "5", "--speed", "max", "--hub", "none", "--json")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["start", *["step"] * 5, "end"]
    assert events[0]["simulated"] is True and events[0]["world"] == 32
    assert (tmp_path / "run" / "layout.toml").exists()


def test_text_begins_with_the_mark(tmp_path: Path) -> None:
    done = printed(tmp_path, "--steps", "2", "--speed", "max", "--hub", "none")
    assert done.stdout.startswith("SIMULATED run: 32 ranks")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["--speed", "0"],
            "--speed '0' is not legal; legal: max, or simulated seconds per real second, 0.001 to 1e+06",
        ),
        (["--seed", "-1"], "--seed '-1' is not legal; legal: a whole number from 0 to 2147483647"),
        (["--steps", "none"], "--steps 'none' is not legal; legal: a whole number from 1 to 2147483647"),
        (["--hardware", "abacus"], "hardware 'abacus' is not known; legal: V100"),
        (["--scenario", "missing.toml"], "cannot read the scenario missing.toml: No such file or directory"),
        (["--warp", "9"], "engine simulate has no option --warp; see engine simulate --help"),
        (["grid.tp=3"], "grid.tp = 3 does not divide model.heads = 16"),
        (["--hub", "ftp://x"], "ftp://x is not a URL this release can reach"),
    ],
)
def test_a_refusal_is_one_sentence_and_exit_2(tmp_path: Path, arguments: list[str], why: str) -> None:
    done = printed(tmp_path, *arguments)
    assert done.returncode == 2 and done.stderr.startswith(why), done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------- with a hub


def test_it_is_seen_and_steered_like_a_run(tmp_path: Path) -> None:
    with running(tmp_path, "--speed", "0.3") as (process, client):
        assert all(hello.simulated for hello in client.state.hellos.values())
        id = client.propose({"micro_batches": 16, "lr_scale": 0.5})
        applied = wait_for_command(client, id, 30.0, settled=True)
        assert applied and (applied.state, applied.acks, applied.world) == ("applied", 32, 32)
        poll_until(client, lambda: client.state.summaries[-1].knobs["micro_batches"] == 16)
        assert client.state.board and client.state.board.revision == 1
        id = client.propose({"micro_batches": 3})
        refused = wait_for_command(client, id, 30.0, settled=True)
        assert refused and refused.state == "rejected" and "micro_batches = 3 is not legal" in refused.why
        query = client.preview({"micro_batches": 8})
        poll_until(client, lambda: query in client.previews)
        assert client.previews[query].estimates
        # without a request, peers are sent every 20 steps
        poll_until(client, lambda: len(client.state.peers) == 32)
        client.request_samples("experts", "timeline", "peers")
        poll_until(client, lambda: len(client.state.peers) == 32 and len(client.state.timelines) == 2)
        id = client.propose({"stop": True})
        ended = wait_for_command(client, id, 30.0, settled=True)
        assert ended and (ended.state, ended.acks) == ("applied", 32)
        assert process.wait(20) == 0


def test_a_pause_stops_simulated_time(tmp_path: Path) -> None:
    with running(tmp_path, "--speed", "0.3") as (_, client):
        wait_for_command(client, client.propose({"pause": True}), 30.0, settled=True)
        poll_until(
            client,
            lambda: client.state.pulses and all(p.doing == "paused" for p in client.state.pulses.values()),
        )
        at = client.state.summaries[-1].step
        client.poll(1.0)
        assert client.state.summaries[-1].step == at
        wait_for_command(client, client.propose({"resume": True}), 30.0, settled=True)
        poll_until(client, lambda: client.state.summaries[-1].step > at)


@pytest.mark.exhaustive
def test_a_lost_node_is_missed_and_comes_back(tmp_path: Path) -> None:
    lost = "[[events]]\nkind = 'lost'\nstep = 3\nnode = 1\nseconds = 1.0"
    (tmp_path / "scenario.toml").write_text(lost)
    with running(tmp_path, "--speed", "0.12", "--scenario", str(tmp_path / "scenario.toml")) as (_, client):
        poll_until(client, lambda: ("unheard", "run") in client.state.alerts)
        assert sorted(client.state.gone) == list(range(8, 16))
        poll_until(client, lambda: not client.state.gone and client.state.summaries[-1].step > 4)
        poll_until(client, lambda: ("unheard", "run") not in client.state.alerts)


def test_a_hub_that_was_killed_learns_everything_again(tmp_path: Path) -> None:
    with running(tmp_path, "--speed", "0.3") as (_, client):
        before = hub(tmp_path)
        os.kill(before.pid, signal.SIGKILL)
        hub(tmp_path, after=before.epoch)
        poll_until(client, lambda: client.epoch not in ("", before.epoch) and len(client.state.hellos) == 32)
        assert client.state.board


def test_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    with running(tmp_path, "--speed", "0.3") as (process, client):
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        poll_until(client, lambda: len(client.state.gone) == 32)
        assert all(gone.clean for gone in client.state.gone.values())


# -------------------------------------------------------------------------------------------------- the mark


def cockpit(*words: str) -> str:
    command = [sys.executable, "-m", "cockpit", *words]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout


def test_every_headless_output_and_export_has_the_mark(tmp_path: Path) -> None:
    with running(tmp_path, "--speed", "0.3") as (process, _):
        run = str(tmp_path / "run")
        changed = json.loads(cockpit("set", "micro_batches=16", "--wait", "--json", "--run", run))
        assert changed["simulated"] is True
        assert cockpit("set", "lr_scale=0.5", "--wait", "--run", run).rstrip().endswith("SIMULATED")
        assert "· SIMULATED x0.3 ·" in cockpit("snapshot", run).splitlines()[0]
        for command in ("snapshot", "knobs", "log"):
            lines = cockpit(command, run, "--json").splitlines()
            assert lines and all(json.loads(line)["simulated"] is True for line in lines), command
        assert cockpit("knobs", run).rstrip().endswith("SIMULATED")
        assert all(line.endswith("SIMULATED") for line in cockpit("log", run).splitlines())
        assert "this run is simulated: 32 ranks of H100" in cockpit("log", run)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert all(line.endswith("SIMULATED") for line in cockpit("watch", run).splitlines())
    lines = cockpit("export", run, "--format", "ndjson").splitlines()
    assert len(lines) > 100 and all(json.loads(line)["simulated"] is True for line in lines)
    cockpit("export", run, "--format", "csv", "--out", str(tmp_path / "csv"))
    head, first, *_ = (tmp_path / "csv" / "steps.csv").read_text().splitlines()
    assert dict(zip(head.split(","), first.split(","), strict=False))["hub_epoch"] and head.endswith(
        "simulated"
    )
    assert 'cockpit_simulated{run="small"} 1.0' in cockpit("export", run, "--format", "prometheus")
