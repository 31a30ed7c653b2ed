"""Ctrl-C in the terminal of a hub or a relay: the process ends cleanly, and the ranks continue to train."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agents.client import Client
from agents.rundir.hub_file import HUB_FILE
from agents.rundir.socket_directory import endpoints_in, make_socket_directory
from agents.transport.addresses import Endpoints
from tests.faults.guarded import wait
from tests.faults.rank import RankProcess
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import DEADLINE_S, HubProcess, environment, poll_until

CTRL_C = b"\x03"


class Terminal:
    """A `cockpit` command in its own pseudo-terminal, to which a test can send keys."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cockpit", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(),
            preexec_fn=lambda: os.login_tty(theirs),
        )
        os.close(theirs)

    def interrupt(self) -> tuple[int, str]:
        """Press Ctrl-C. Returns the exit status and the output."""
        os.write(self._ours, CTRL_C)
        status = self.process.wait(DEADLINE_S)
        said = b""
        try:
            while more := os.read(self._ours, 1 << 16):
                said += more
        except OSError:  # this is how Linux reports the end of a terminal
            pass
        return status, said.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def sockets() -> Endpoints:
    return endpoints_in(make_socket_directory())


def test_a_hub(opened: Opened, tmp_path: Path, sockets: Endpoints) -> None:
    words = ["hub", "--run", "r", "--dir", str(tmp_path), "--sockets", str(sockets.directory)]
    hub = opened(Terminal(*words))
    wait((tmp_path / HUB_FILE).exists)
    rank = opened(RankProcess(sockets.ranks, 0, 1))
    client = opened(Client(sockets.clients))
    poll_until(client, lambda: client.state.summaries)
    status, said = hub.interrupt()
    assert (status, said.replace("^C", "")) == (0, "")
    assert not (tmp_path / HUB_FILE).exists() and not any(path.exists() for path in sockets.paths)
    assert rank.process.poll() is None
    step = client.state.summaries[-1].step
    again = opened(Terminal(*words))
    poll_until(client, lambda: client.state.summaries and client.state.summaries[-1].step > step)
    assert again.interrupt()[0] == 0


COMMAND = """
import signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for its background jobs
import {package}.__main__ as package, {package}.cli.main as command
def main():
    try:
        print("begins", flush=True)
        time.sleep(60)
    finally:
        time.sleep(0.3)
        print("cleaned up", flush=True)
        threading.Lock().release()  # raises RuntimeError, as an interrupted wait for a condition variable may
command.main = main
package.main()
"""


@pytest.mark.parametrize("package", ["cockpit", "engine"])
def test_twelve_ctrl_c_end_a_command_once(package: str) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(package=package)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout and command.stdout.readline() == "begins\n"
    for _ in range(12):
        command.send_signal(signal.SIGINT)
        time.sleep(0.02)
    said, errors = command.communicate(timeout=DEADLINE_S)
    assert (command.returncode, said, errors) == (130, "cleaned up\n", "")


def test_a_relay(opened: Opened, own_hub: HubProcess, sockets: Endpoints) -> None:
    options = ["--run", "r", "--hub", own_hub.endpoints.ranks, "--sockets", str(sockets.directory)]
    relay = opened(Terminal("relay", *options))
    wait(sockets.paths[0].exists)
    through, direct = (
        opened(RankProcess(sockets.ranks, 1, 2)),
        opened(RankProcess(own_hub.endpoints.ranks, 0, 2)),
    )
    client = opened(Client(own_hub.endpoints.clients))
    poll_until(client, lambda: len(client.state.steps) == 2)
    status, said = relay.interrupt()
    assert (status, said.replace("^C", "").strip()) == (0, sockets.ranks)
    assert not any(path.exists() for path in sockets.paths)
    step = client.state.steps[0].step
    poll_until(client, lambda: client.state.steps[0].step > step + 20)
    assert through.process.poll() is None and direct.process.poll() is None
