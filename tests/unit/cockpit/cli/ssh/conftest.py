"""A live run, and two ways to reach it by ssh:// URLs: a program that stands in for ssh, and a real sshd."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import cockpit
from agents.client import Client
from agents.rundir.runs import newest_live
from cockpit.cli.ssh.failures import REMOTE
from tests.unit.agents.fleet import Fleet, HubProcess, poll_until

ROOT = Path(cockpit.__file__).parent.parent
FAKE = Path(__file__).with_name("fake_ssh.py")
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))


@pytest.fixture(scope="session")
def far_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The other machine's runs folder, which contains the live run r-1."""
    runs = tmp_path_factory.mktemp("far")
    hub = HubProcess(runs / "r-1").start()
    deadline = time.monotonic() + 15
    while newest_live(runs) is None:
        assert time.monotonic() < deadline, "the hub did not start"
        time.sleep(0.02)
    fleet = Fleet(hub.endpoints.ranks)
    done = threading.Event()

    def train() -> None:
        while not done.wait(0.05):
            fleet.turn()

    thread = threading.Thread(target=train)
    thread.start()
    client = Client(hub.endpoints.clients)
    poll_until(client, lambda: client.state.summaries)
    client.close()
    yield runs
    done.set()
    thread.join()
    fleet.close()
    hub.clean_up()


@dataclass
class Server:
    """A test's connection to the other machine, which is named `far`: an `ssh` command on the PATH, which is either the
    stand-in or OpenSSH with a real sshd. `folder` contains the files of the connection, such as keys and
    configuration."""

    folder: Path
    log: Path | None  # the command lines of the stand-in


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, far_runs: Path, tmp_path: Path) -> None:
    """Give this machine an empty runs folder, and the other machine a `cockpit` command that uses the other machine's
    runs folder."""
    (tmp_path / "near").mkdir()
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path / "near"))
    command = tmp_path / "cockpit"
    words = f"cd '{ROOT}' && COCKPIT_RUNS='{far_runs}' exec '{sys.executable}' -m cockpit \"$@\""
    command.write_text(f"#!/bin/sh\necho 'Welcome, {{ann}}'\n{words}\n")
    command.chmod(0o700)
    monkeypatch.setenv(REMOTE, str(command))


def on_path(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program `ssh` in the first folder of the PATH."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "ssh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    on_path(tmp_path, f"exec '{sys.executable}' '{FAKE}' \"$@\"", monkeypatch)
    monkeypatch.setenv("FAKE_SSH_LOG", str(tmp_path / "log"))
    return Server(tmp_path, tmp_path / "log")


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Server]:
    """OpenSSH's server on the loopback address, with its own keys. The fixture's parameter, if any, is appended to
    `sshd_config`."""
    if SSHD is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs sshd and ssh-keygen (Debian: openssh-server)")
    if os.getuid() == 0 and not Path("/run/sshd").is_dir():
        pytest.skip("sshd of root needs the folder /run/sshd")
    for name in ("host", "me", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    shutil.copy(tmp_path / "me.pub", tmp_path / "authorized")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {tmp_path / 'host'}\nStrictModes no\nUsePAM no\n"
        f"AuthorizedKeysFile {tmp_path / 'authorized'}\nPidFile none\nPasswordAuthentication no\n"
        f"KbdInteractiveAuthentication no\n{getattr(request, 'param', '')}\n"
    )
    (tmp_path / "ssh_config").write_text(
        f"Host far\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {tmp_path / 'me'}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {tmp_path / 'known'}\n  GlobalKnownHostsFile /dev/null\n"
        "  StrictHostKeyChecking yes\n  RemoteCommand echo no\n  LocalForward 9 localhost:9\n"
    )
    (tmp_path / "known").write_text(f"[127.0.0.1]:{port} {(tmp_path / 'host.pub').read_text()}")
    on_path(tmp_path, f"exec {shutil.which('ssh')} -F '{tmp_path / 'ssh_config'}' \"$@\"", monkeypatch)
    server = subprocess.Popen([SSHD, "-D", "-f", tmp_path / "sshd_config", "-E", tmp_path / "sshd.log"])
    deadline = time.monotonic() + 15
    while True:
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "sshd.log").read_text()
        time.sleep(0.05)
    yield Server(tmp_path, None)
    server.terminate()
    server.wait(10)


@pytest.fixture(params=["fake", "sshd"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found
