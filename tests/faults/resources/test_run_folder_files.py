"""Files of a run's folder that another user has replaced by a pipe or a link: nothing waits for the pipe, and what the
link points to is not changed."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from agents.hub.commands.journal_file import JournalFile
from agents.protocol.base import RunError
from agents.recording.writer import RecordingWriteError, RecordingWriter
from agents.rundir.failure_file import FAILURE_FILE, forget_failure
from agents.rundir.hub_file import HUB_FILE, HubFile, write_hub_file
from agents.rundir.hub_supervisor import HubSupervisor
from agents.rundir.runs import COMMANDS_FILE, HUB_LOG, RECORD_FILE
from agents.rundir.socket_directory import endpoints_in
from agents.transport.open_files import append_text
from cockpit.data.sources.engine_process import EngineProcess
from engine.checkpoint.folder_lock import LOCK, lock_folder
from engine.config.toml import LAYOUT_FILE, load, write_copy, write_layout
from engine.launch.processes.standard_output import LOG
from engine.simulate.run import SCENARIO_FILE
from tests.unit.agents.fleet import environment

pytestmark = pytest.mark.timeout(60)


def lock(folder: Path) -> None:
    with lock_folder(folder):
        pass


def start_hub(folder: Path) -> None:
    hub = HubSupervisor([sys.executable, "-c", "print('said')"], folder / HUB_LOG)
    hub.start()
    assert hub.pid, "the hub runs without its log"
    hub.close()


def start_engine(folder: Path) -> None:
    with EngineProcess(folder / "none.toml", [], folder):
        pass


def write_output(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", OUTPUT, str(folder)], env=environment(), check=True, timeout=30)


def hub_file(folder: Path) -> None:
    write_hub_file(folder, HubFile("run", "1", endpoints_in(folder / "sockets"), 1, 1, 0.0))


OUTPUT = """
import sys, pathlib
from engine.launch.processes.standard_output import StandardOutput
with StandardOutput(as_json=False) as output:
    output.copy_to(pathlib.Path(sys.argv[1]))
    print("line")
"""
WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "hub log": (HUB_LOG, start_hub),
    "failure, appended": (FAILURE_FILE, lambda folder: append_text(folder / FAILURE_FILE, "why\n")),
    "failure, forgotten": (FAILURE_FILE, forget_failure),
    "hub file": (HUB_FILE, hub_file),
    "layout": (LAYOUT_FILE, lambda folder: write_layout(load("layouts/demo.toml"), folder)),
    "scenario": (SCENARIO_FILE, lambda folder: write_copy(folder / SCENARIO_FILE, "text")),
    "lock": (LOCK, lock),
    "output": (LOG, write_output),
    "output of a demo": (LOG, start_engine),
    "recording": (RECORD_FILE, lambda folder: RecordingWriter(folder / RECORD_FILE, 1 << 20, 1 << 20)),
    "log of the recording": (
        f"{RECORD_FILE}-wal",
        lambda folder: RecordingWriter(folder / RECORD_FILE, 1 << 20, 1 << 20),
    ),
    "commands": (COMMANDS_FILE, lambda folder: JournalFile(folder / COMMANDS_FILE)),
}
CAUSE = "2026-01-01 00:00:00 a rank was killed\n"


@pytest.mark.parametrize("kind", ["pipe", "pipe with a reader", "link", "link to nothing"])
@pytest.mark.parametrize("what", WRITERS)
def test_a_pipe_or_a_link_in_place_of_a_file(what: str, kind: str, tmp_path: Path) -> None:
    name, write = WRITERS[what]
    folder, target, reader = tmp_path / "run", tmp_path / "target", None
    folder.mkdir()
    if kind.startswith("pipe"):
        os.mkfifo(folder / name)
        if kind == "pipe with a reader":
            reader = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
    else:
        (folder / name).symlink_to(target)
        if kind == "link":
            target.write_text(CAUSE)
    try:
        with suppress(OSError, RunError, RecordingWriteError, sqlite3.Error):
            write(folder)
        assert reader is None or os.read(reader, 10) == b""
    finally:
        if reader is not None:
            os.close(reader)
    assert target.read_text() == CAUSE if kind == "link" else not target.exists()


@pytest.mark.exhaustive
def test_a_simulated_run_in_such_a_folder_ends_and_changes_nothing_else(tmp_path: Path) -> None:
    folder, target = tmp_path / "run", tmp_path / "target"
    folder.mkdir()
    target.write_text("unchanged")
    for name in (HUB_LOG, RECORD_FILE, COMMANDS_FILE):
        os.mkfifo(folder / name)
    for name in (LAYOUT_FILE, SCENARIO_FILE, LOG):
        (folder / name).symlink_to(target)
    scenario = "layouts/scenarios/straggler.toml"
    words = ["simulate", "layouts/demo.toml", "--scenario", scenario, "--steps", "3", "--speed", "1000"]
    done = subprocess.run(
        [sys.executable, "-m", "engine", *words, "--run-dir", str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"cannot write {folder / HUB_LOG}: {HUB_LOG} is not a regular file; the hub runs without it\n"
        in done.stderr
    )
    assert target.read_text() == "unchanged"
    assert not (folder / LAYOUT_FILE).is_symlink() and "[grid]" in (folder / LAYOUT_FILE).read_text()
