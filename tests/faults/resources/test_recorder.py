"""Fault 13: the disk is full. Telemetry continues, an event reports that the recording has stopped, and commands are
refused."""

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agents.client import Client
from agents.recording.reader import Recording
from agents.recording.replay import Replay
from agents.rundir import runs
from agents.waiting import wait_for_command
from tests.faults.scaled import program
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import SOURCE, Fleet, HubProcess, poll_until
from tests.unit.agents.recording.test_replay import recorded


def events(client: Client) -> list[str]:
    return [event.text for event in client.state.events]


class SmallDisk(HubProcess):
    """A hub whose run folder is a file system of 300 KiB. The hub has its own mount namespace."""

    def start(self, *options: str) -> "SmallDisk":
        self.folder.mkdir()
        hub = [sys.executable, "-m", "agents.hub", "--run", "r", "--dir", str(self.folder)]
        command = [*hub, "--sockets", str(self.endpoints.directory), *options]
        mounted = f"mount -t tmpfs -o size=300k tmpfs {self.folder} && exec {' '.join(command)}"
        self.process = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted],
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
        )
        return self

    @property
    def inside(self) -> Path:
        """The path through which this process sees the hub's run folder."""
        return Path(f"/proc/{self.process.pid}/root{self.folder}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    probe = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        f"mount -t tmpfs tmpfs {tmp_path}",
    ]
    try:
        refused = subprocess.run(probe, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("this machine has no unshare to make a small file system with")
    if refused.returncode:
        pytest.skip(f"this machine does not allow mounting a small file system: {refused.stderr.strip()}")
    hub = SmallDisk(tmp_path / "run").start()
    yield hub
    hub.clean_up()


def test_a_disk_fills_up(small_disk: SmallDisk, opened: Opened, tmp_path: Path) -> None:
    """The test fills a real file system."""
    client = opened(Client(small_disk.endpoints.clients))
    fleet = opened(Fleet(small_disk.endpoints.ranks, 8))

    def turns() -> None:
        for _ in range(20):
            fleet.turn()

    poll_until(client, lambda: any("the recording stops" in text for text in events(client)), turns)
    assert any("disk is full" in text and "telemetry continues" in text for text in events(client))
    (small_disk.inside / "rest").write_bytes(b"")
    with (
        (small_disk.inside / "rest").open("ab", buffering=0) as rest,
        pytest.raises(OSError, match="No space"),
    ):
        while True:
            rest.write(bytes(4096))
    # SQLite may have free pages in its files; a command that fits into these is applied as usual.
    accepted: list[str] = []
    while True:
        turn = len(accepted) % 2
        asked = client.propose({"micro_batches": (8, 4)[turn]}, who="somebody" * 500)
        poll_until(
            client,
            lambda asked=asked: asked in client.state.commands and client.state.commands[asked].settled,
            fleet.turn,
        )
        if client.state.commands[asked].state == "rejected":
            break
        accepted.append(asked)
    assert "the journal cannot be written" in client.state.commands[asked].why
    for name in (runs.COMMANDS_FILE, f"{runs.COMMANDS_FILE}-wal"):
        shutil.copy(small_disk.inside / name, tmp_path)
    with closing(sqlite3.connect(tmp_path / runs.COMMANDS_FILE)) as db:
        journalled = [row[0] for row in db.execute("SELECT id FROM commands")]
    assert journalled == accepted and len(fleet.carried_out) == len(accepted)
    step = fleet.step
    poll_until(client, lambda: client.state.summaries[-1].step > step + 3, fleet.turn)
    assert sum("the recording stops" in text for text in events(client)) == 1


def test_a_disk_has_space_again(tmp_path: Path, opened: Opened) -> None:
    """Here a limit on file sizes replaces the full disk, so that the test runs on any machine. When the limit is
    lifted, the recording continues without a restart of the hub.
    """
    hub = HubProcess(tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    scaled = {"agents.hub.recorder.RETRY_S": 0.3}
    hub.process = subprocess.Popen(
        [
            *program("agents.hub.process", scaled),
            "--run",
            "r",
            "--dir",
            str(hub.folder),
            "--sockets",
            str(hub.endpoints.directory),
        ],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    try:
        client = opened(Client(hub.endpoints.clients))
        fleet = opened(Fleet(hub.endpoints.ranks, 2))
        poll_until(client, lambda: client.state.board, fleet.turn)
        poll_until(client, lambda: recorded(hub.folder / runs.RECORD_FILE), fleet.turn)
        resource.prlimit(hub.process.pid, resource.RLIMIT_FSIZE, (1, limits[1]))
        poll_until(client, lambda: any("the recording stops" in text for text in events(client)), fleet.turn)
        refused = wait_for_command(client, client.propose({"micro_batches": 8}), 10.0)
        assert refused.state == "rejected" and "the journal cannot be written" in refused.why
        resource.prlimit(hub.process.pid, resource.RLIMIT_FSIZE, limits)
        poll_until(client, lambda: "the recording continues after a gap" in events(client), fleet.turn)
        accepted = client.propose({"micro_batches": 8})
        poll_until(
            client,
            lambda: accepted in client.state.commands and client.state.commands[accepted].settled,
            fleet.turn,
        )
        assert client.state.commands[accepted].state == "applied"
        hub.stop()
        replay = Replay(Recording(hub.folder / runs.RECORD_FILE))
        replay.seek(replay.recording.at_end())
        assert replay.state.commands[accepted] == client.state.commands[accepted]
        assert len(replay.recording.segments()) == 2, "the gap is where the second begins"
    finally:
        hub.clean_up()
