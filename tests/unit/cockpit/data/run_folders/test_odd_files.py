"""A run folder with devices or pipes in place of files: each command prints a one-sentence error message and does not
block."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.rundir.failure_file import FAILURE_FILE
from agents.rundir.hub_file import HUB_FILE
from agents.rundir.runs import COMMANDS_FILE, RECORD_FILE
from cockpit.cli.main import run

FILES = [HUB_FILE, RECORD_FILE, COMMANDS_FILE, FAILURE_FILE, f"{RECORD_FILE}-wal", f"{COMMANDS_FILE}-wal"]


@pytest.fixture
def bounded() -> Iterator[None]:
    """Limits the memory of this process, because reading from a device may never end."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", ["log", "snapshot"])
def test_each_command_ends_with_one_sentence(
    tmp_path: Path, bounded: None, capsys: pytest.CaptureFixture[str], command: str, name: str, kind: str
) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).mkdir()
    status = run([command, "--run", str(tmp_path)])
    out, told = capsys.readouterr()
    assert status in (1, 2) and out == "" and told.count("\n") <= 2 and len(told) < 1000
