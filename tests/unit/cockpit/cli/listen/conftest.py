"""Fixtures for the tests of `cockpit listen`."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.cockpit.cli.listen.exports import Noted

DEADLINE_S = 30.0


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[str]:
    """Start `cockpit listen` with `tmp_path` as its runs folder, and yield the URL that it listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "cockpit", "listen", "--otlp", str(port), "--metric", "my.norm=grad_norm"],
        env=os.environ | {"COCKPIT_RUNS": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout and b"receives OTLP" in process.stdout.readline()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 130


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> "Noted":
    from tests.unit.cockpit.cli.listen.exports import Noted

    return Noted(monkeypatch)
