"""Output that fails: a full disk, a closed pipe, a closed stream, an encoding that cannot represent some characters."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.client import Client
from tests.faults.rank import RankProcess
from tests.unit.agents.fleet import HubProcess, environment, poll_until

pytestmark = pytest.mark.xdist_group("output")  # its tests share a fixture

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a live run with one rank."""
    hub = HubProcess(tmp_path_factory.mktemp("run")).start()
    rank, client = RankProcess(hub.endpoints.ranks, 0, 1), Client(hub.endpoints.clients)
    poll_until(client, lambda: client.state.summaries and client.state.board)
    client.close()
    yield hub.folder
    rank.close()
    hub.clean_up()


def cockpit(words: str, run: Path, after: str = "", **variables: str) -> subprocess.CompletedProcess[bytes]:
    shell = f'exec "{sys.executable}" -m cockpit {words} --run "{run}" {after}'
    return subprocess.run(shell, shell=True, env=environment() | variables, capture_output=True, timeout=60)


@needs_full
@pytest.mark.parametrize("words", ["watch --json", "snapshot", "knobs --json"])
def test_a_full_disk_gets_one_sentence(live: Path, words: str) -> None:
    done = cockpit(words, live, ">/dev/full")
    assert done.stderr == b"standard output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("words", ["watch --json", "watch", "snapshot", "knobs"])
def test_a_closed_pipe_ends_a_command_quietly(live: Path, words: str) -> None:
    """The command prints no message, and its exit status is that of ``yes`` in ``yes | true`` in a shell."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "cockpit", *words.split(), "--run", str(live)]
    done = subprocess.run(command, env=environment(), stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_closed_streams(live: Path) -> None:
    done = cockpit("snapshot --json", live, "<&- >&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


LOCALES = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.mark.parametrize("variables", LOCALES.values(), ids=LOCALES.keys())
def test_an_encoding_without_our_characters(live: Path, variables: dict[str, str]) -> None:
    plain = cockpit("snapshot", live, **variables)
    assert plain.returncode == 0, plain.stderr
    assert b"LIVE" in plain.stdout and not plain.stderr
    record = cockpit("snapshot --json", live, **variables)
    assert json.loads(record.stdout.decode("utf-8"))["run"] == "r"
    refused = cockpit("set micro_batches=7", live, **variables)
    assert refused.returncode == 3 and b"legal: 1, 2, 4, 8" in refused.stdout, refused.stderr
