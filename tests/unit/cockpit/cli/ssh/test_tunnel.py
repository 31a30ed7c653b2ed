"""Tests commands for a run on another machine, both through a fake ssh program and through a real sshd on the loopback
address."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cockpit.cli.main import run
from cockpit.cli.ssh.failures import REMOTE
from cockpit.cli.ssh.target import parse
from cockpit.cli.ssh.tunnel import SOCKETS, Tunnel, tunnel_to
from cockpit.data.sources.connection import Connection, address
from cockpit.data.sources.ssh_sockets import VARIABLE
from tests.unit.cockpit.cli.ssh.conftest import ROOT, Server

URL = "ssh://far/r-1"


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which tunnels make their directories; its path must be short."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def test_a_run_of_another_machine_is_read_by_its_name_there(
    server: Server, sockets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["snapshot", "--run", URL, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["ranks"]) == 4
    assert not list(sockets.iterdir())
    assert VARIABLE not in os.environ


def test_without_a_name_it_is_the_newest_live_run(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "ssh://far", "--width", "200"]) == 0
    assert "4/4 ranks" in capsys.readouterr().out


def test_only_an_operator_gets_the_socket_for_changes(server: Server, sockets: Path) -> None:
    with tunnel_to(URL, operator=False):
        (directory,) = sockets.iterdir()
        assert address(URL).endpoint == f"ipc://{directory / 'viewers'}"
        with Connection(URL, operator=True) as connection:
            connection.wait_for_snapshot()
            id = connection.client.propose({"micro_batches": 8})
            assert until(lambda: bool(connection.client.poll(0.05) or id in connection.client.denied), 10)
            assert "only watches" in connection.client.denied[id]
    with tunnel_to(URL, operator=True):
        (directory,) = sockets.iterdir()
        assert address(URL, operator=True).endpoint == f"ipc://{directory / 'clients'}"
        assert address(URL, watch_only=True).endpoint == f"ipc://{directory / 'viewers'}"


def test_a_command_that_changes_the_run_needs_no_option(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["set", "--run", URL, "micro_batches=8", "--wait"]) == 0
    assert "applied" in capsys.readouterr().out
    assert run(["undo", "--run", URL, "--wait"]) == 0


def test_a_lost_connection_is_stale_and_comes_back(server: Server, sockets: Path) -> None:
    (sockets / "d").mkdir(mode=0o700)
    tunnel = Tunnel(parse(URL), False, sockets / "d")
    tunnel.open()
    os.environ[VARIABLE] = str(sockets / "d")
    try:
        tunnel.keep()
        with Connection(URL) as connection:
            connection.wait_for_snapshot()
            assert tunnel._process
            tunnel._process.kill()
            assert until(lambda: not any((sockets / "d" / name).exists() for name in SOCKETS), 5)
            while connection.client.poll(0.1):
                pass
            before = connection.store.state.summaries[-1].step
            assert (connection.client.age_s or 0) >= 0.1

            def newer() -> bool:
                connection.poll(0.1)
                return connection.store.state.summaries[-1].step > before

            assert until(newer)
    finally:
        del os.environ[VARIABLE]
        tunnel.close()


def test_the_other_machine_is_left_when_this_process_is_killed(server: Server, tmp_path: Path) -> None:
    watching = subprocess.Popen(
        [sys.executable, "-m", "cockpit", "watch", URL], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert watching.stdout and watching.stdout.readline().startswith("step")
    marker = "where --hold --run=r-1\0".replace(" ", "\0").encode()
    assert _processes(marker)
    watching.kill()
    watching.wait()
    watching.stdout.close()
    assert until(lambda: not _processes(marker))


def _processes(marker: bytes) -> list[Path]:
    """The `cmdline` files in /proc, one per process, that this user can read and that contain `marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in path.read_bytes():
                found.append(path)
        except OSError:
            continue
    return found


def test_runs_of_another_machine_are_listed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "ssh://far"]) == 0
    assert "r-1" in capsys.readouterr().out
    assert run(["runs", "ssh://far", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["state"] == "live"


@pytest.mark.parametrize(
    ("url", "remote", "sentence"),
    [
        ("ssh://far/none", None, "on far: there is no run none"),
        (URL, "/nowhere/cockpit", "far has no command /nowhere/cockpit"),
    ],
)
def test_failures_on_the_other_machine(
    server: Server,
    url: str,
    remote: str | None,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    sockets: Path,
) -> None:
    if remote:
        monkeypatch.setenv(REMOTE, remote)
    assert run(["status", url]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(sockets.iterdir())


def test_a_key_that_the_server_does_not_know(sshd: Server, capsys: pytest.CaptureFixture[str]) -> None:
    (sshd.folder / "authorized").write_bytes((sshd.folder / "other.pub").read_bytes())
    assert run(["status", URL]) == 2
    assert "far refused the login" in capsys.readouterr().err


def test_an_unknown_and_a_changed_host_key(sshd: Server, capsys: pytest.CaptureFixture[str]) -> None:
    known = (sshd.folder / "known").read_text()
    (sshd.folder / "known").write_text("")
    assert run(["status", URL]) == 2
    assert "the host key of far is not known here" in capsys.readouterr().err
    other = (sshd.folder / "other.pub").read_text()
    (sshd.folder / "known").write_text(f"{known.split()[0]} {other}")
    assert run(["status", URL]) == 2
    assert "the host key of far has changed" in capsys.readouterr().err


@pytest.mark.parametrize("sshd", ["AllowStreamLocalForwarding no"], indirect=True)
def test_a_server_that_forwards_no_sockets(sshd: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", URL]) == 2
    assert "does not forward the hub's socket" in capsys.readouterr().err


def test_a_stand_in_that_prohibits_forwarding(
    fake: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SSH_PROHIBITS", "1")
    assert run(["status", URL]) == 2
    assert "does not forward the hub's socket" in capsys.readouterr().err


def test_ssh_refuses_the_login(
    fake: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SSH_PRINTS", "ann@far: Permission denied (publickey).")
    assert run(["status", "ssh://ann@far/r-1"]) == 2
    assert "far refused the login as ann" in capsys.readouterr().err


def test_the_host_follows_two_dashes(fake: Server) -> None:
    assert run(["status", "ssh://ann@far:2222/r-1"]) == 0
    assert fake.log
    login, *requests = [json.loads(line) for line in fake.log.read_text().splitlines()]
    assert login[login.index("-l") :][:6] == ["-l", "ann", "-p", "2222", "--", "far"]
    assert "BatchMode=no" in login
    assert login[-1].endswith("where --hold --run=r-1")
    assert all(words[-2:] == ["--", "far"] for words in requests)


def test_a_machine_without_ssh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert run(["status", URL]) == 2
    assert "no program ssh" in capsys.readouterr().err


def test_a_command_that_reads_files_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", URL]) == 2
    assert "run it there: ssh HOST cockpit replay" in capsys.readouterr().err
