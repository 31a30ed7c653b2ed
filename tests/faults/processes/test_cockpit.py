"""Fault 4: a killed or suspended cockpit affects neither the hub nor the training."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from agents.client import Client
from tests.faults.rank import RankProcess
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import HubProcess, environment, poll_until

COCKPIT = [sys.executable, "-m", "cockpit"]


class Watcher:
    """A `cockpit watch` process, and the last step that it printed."""

    def __init__(self, folder: Path) -> None:
        command = [*COCKPIT, "watch", "--run", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        self.step = -1
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if told := re.match(r"step +(\d+)", line):
                self.step = int(told[1])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def test_a_suspended_watcher_affects_only_itself(own_hub: HubProcess, opened: Opened) -> None:
    """If a `cockpit watch` process is suspended, other clients lose no update; after it has been resumed, it catches
    up. (`test_scale` measures the memory of the hub.)
    """
    rank = opened(RankProcess(own_hub.endpoints.ranks, 0, 1, step_s=0.002))
    client = opened(Client(own_hub.endpoints.clients))
    poll_until(client, lambda: client.state.summaries and client.state.board)
    watcher = opened(Watcher(own_hub.folder))
    poll_until(client, lambda: watcher.step > 0)
    watcher.process.send_signal(signal.SIGSTOP)
    step, resets = client.state.summaries[-1].step, client.resets
    poll_until(client, lambda: client.state.summaries[-1].step > step + 1000)
    assert client.resets == resets, "another watcher has missed nothing"
    assert watcher.step < step + 250, "the watcher was not suspended"
    watcher.process.send_signal(signal.SIGCONT)
    poll_until(client, lambda: watcher.step > step + 1000)  # it catches up

    watcher.process.kill()
    step = client.state.summaries[-1].step
    poll_until(client, lambda: client.state.summaries[-1].step > step + 200)
    assert rank.process.poll() is None and own_hub.process.poll() is None


def test_a_killed_screen_affects_nothing(own_hub: HubProcess, opened: Opened) -> None:
    rank = opened(RankProcess(own_hub.endpoints.ranks, 0, 1))
    client = opened(Client(own_hub.endpoints.clients))
    poll_until(client, lambda: client.state.summaries and client.state.board)
    ours, theirs = pty.openpty()
    screen = subprocess.Popen(
        [*COCKPIT, "attach", str(own_hub.folder), "--operator"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment() | {"TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    try:
        os.set_blocking(ours, False)

        def drawn() -> bool:
            nonlocal shown
            with contextlib.suppress(BlockingIOError):
                shown += os.read(ours, 1 << 16)
            return b"LIVE" in shown

        poll_until(client, drawn)
        resets = client.resets  # 2 if the hub's first answer was so slow that the client has asked again
        for number in (signal.SIGSTOP, signal.SIGKILL):
            screen.send_signal(number)
            step = client.state.summaries[-1].step
            poll_until(client, lambda step=step: client.state.summaries[-1].step > step + 20)
    finally:
        screen.kill()
        screen.wait()
        os.close(ours)
    assert client.resets == resets and not client.state.gone
    assert rank.process.poll() is None and own_hub.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGSTOP])
def test_a_screen_that_was_suspended_is_whole_and_takes_keys(
    own_hub: HubProcess, opened: Opened, number: signal.Signals
) -> None:
    opened(RankProcess(own_hub.endpoints.ranks, 0, 1))
    client = opened(Client(own_hub.endpoints.clients))
    poll_until(client, lambda: client.state.summaries and client.state.board)
    ours, theirs = pty.openpty()
    modes = termios.tcgetattr(theirs)
    screen = subprocess.Popen(
        [*COCKPIT, "attach", str(own_hub.folder)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment() | {"TERM": "xterm-256color"},
        start_new_session=True,
    )
    shown = b""

    def drawn(text: str) -> bool:
        nonlocal shown
        with contextlib.suppress(BlockingIOError):
            shown += os.read(ours, 1 << 16)
        return text.encode() in shown

    def state() -> str:
        return Path(f"/proc/{screen.pid}/stat").read_text().rpartition(")")[2].split()[0]

    try:
        os.set_blocking(ours, False)
        poll_until(client, lambda: drawn("LIVE"))
        screen.send_signal(number)
        poll_until(client, lambda: drawn("LIVE") and state() == "T")
        while drawn("") and (old := shown) and drawn("") and shown != old:
            pass  # what was written before the suspension
        shown = b""
        screen.send_signal(signal.SIGCONT)
        # the tabs never change, so only a whole picture has them
        poll_until(client, lambda: drawn("Overview"))
        os.write(ours, b"8")
        poll_until(client, lambda: drawn(" entries "))
        os.write(ours, b"q")
        poll_until(client, lambda: drawn("") and screen.poll() is not None)
        assert screen.returncode == 0
        assert termios.tcgetattr(theirs) == modes, "the terminal is left as it was"
    finally:
        screen.kill()
        screen.wait()
        os.close(ours)
        os.close(theirs)
