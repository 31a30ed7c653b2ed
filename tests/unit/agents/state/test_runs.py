"""Finding a run by its folder and sockets: a live run is found, and for any other run, the error message is one
sentence."""

import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import structs

from agents import protocol
from agents.rundir import runs
from agents.rundir.failure_file import FAILURE_FILE, forget_failure, last_failure
from agents.rundir.hub_file import (
    ElsewhereError,
    HubFile,
    check_readable,
    folder_identity,
    read_hub_file,
    remove_hub_file,
    write_hub_file,
)
from agents.rundir.local_machine import Machine, process_start, process_state, this_host, this_machine
from agents.rundir.run_folder import make_folder, stamped
from agents.rundir.runs import RunError, check_path, folder_name, remove_unrecorded
from agents.rundir.socket_directory import check_socket_directory, endpoints_in, make_socket_directory
from agents.transport.addresses import Endpoints


def add_run(runs_dir: Path, name: str, pid: int, started_s: float = 1.0) -> HubFile:
    folder = runs_dir / name
    sockets = folder / "s"
    folder.mkdir(parents=True)
    sockets.mkdir(mode=0o700)
    hub = HubFile(
        name,
        "epoch",
        endpoints_in(sockets),
        pid,
        protocol.VERSION,
        started_s,
        folder=folder_identity(folder),
    )
    write_hub_file(folder, hub)
    return hub


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_newest_live_run_is_found(tmp_path: Path, dead_pid: int) -> None:
    add_run(tmp_path, "older", os.getpid(), 1.0)
    newer = add_run(tmp_path, "newer", os.getpid(), 2.0)
    add_run(tmp_path, "dead", dead_pid, 3.0)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "hub.json").write_text('{"run": "bro')
    found = runs.newest_live(tmp_path)
    assert found is not None and found.hub == newer
    assert runs.resolve(None, tmp_path) == newer.endpoints
    assert {run.name: run.live for run in runs.list_runs(tmp_path)} == {
        "older": True,
        "newer": True,
        "dead": False,
        "broken": False,
    }


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(process.pid) == "ended"
    process.wait()


def test_a_run_is_named_by_name_folder_or_url(tmp_path: Path) -> None:
    endpoints = add_run(tmp_path / "runs", "r", os.getpid()).endpoints
    for target in ("r", str(tmp_path / "runs" / "r"), f"ipc://{endpoints.directory}", endpoints.ranks):
        assert runs.resolve(target, tmp_path / "runs") == endpoints


def test_an_unreachable_run_gets_one_sentence(tmp_path: Path, dead_pid: int) -> None:
    add_run(tmp_path, "dead", dead_pid)
    (tmp_path / "bare").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "hub.json").write_text("[]")
    add_run(tmp_path, "everyone", -1)  # to kill(2), all processes
    for target, sentence in {
        "dead": f"process {dead_pid}.* is not alive",
        "nowhere": "there is no run nowhere in .*; the runs there are: .*dead",
        "bare": "no hub serves the run .*no hub.json",
        "broken": "is not a hub file",
        "everyone": "is not a hub file: Expected `int` >= 1",
        "http://host:80": "legal: ipc://DIRECTORY",
    }.items():
        with pytest.raises(RunError, match=sentence):
            runs.resolve(target, tmp_path)
    absent = tmp_path / "absent"
    with pytest.raises(RunError, match=f"no run in {absent} is live; start one, or name a run or its folder"):
        runs.resolve(None, absent)
    with pytest.raises(RunError, match=f"no run in {tmp_path} is live; start one"):
        runs.resolve(None, tmp_path)  # none of the folders can be opened, so none is offered
    for name, content in (("recorded", b"SQLite format 3\0"), ("unreadable", b"x" * 99)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.db").write_bytes(content)
    with pytest.raises(
        RunError, match=f"no run in {tmp_path} is live; the newest recorded run is recorded; start"
    ):
        runs.resolve(None, tmp_path)


def test_runs_that_an_error_does_not_name_are_counted(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"r{number}").mkdir()
        (tmp_path / f"r{number}" / "hub.json").write_text("[]")
    with pytest.raises(RunError, match=r"the runs there are: r\d(, r\d){7} and 2 more$"):
        runs.find_folder("x", tmp_path)
    with pytest.raises(RunError, match=r"the runs there are: none$"):
        runs.find_folder("x", tmp_path / "absent")


@pytest.mark.parametrize("target", ["", ".", "..", "../..", "{}"])
def test_the_folder_of_runs_is_not_a_run(tmp_path: Path, target: str) -> None:
    runs_dir = tmp_path / "runs"
    add_run(runs_dir, "r", os.getpid())
    sentence = "the name of the run is empty" if not target else "is not a run, but the folder of runs"
    with pytest.raises(RunError, match=f"{sentence}.*; the runs there are: r$"):
        runs.find_folder(target.format(runs_dir), runs_dir)
    assert runs.find_folder(str(runs_dir / "r"), runs_dir / "r" / "checkpoints") == runs_dir / "r"


def test_a_hub_file_is_validated(tmp_path: Path) -> None:
    endpoints = add_run(tmp_path, "theirs", os.getpid()).endpoints
    endpoints.directory.chmod(0o777)
    with pytest.raises(RunError, match="must be a directory of yours with mode 0700"):
        runs.resolve("theirs", tmp_path)
    deep, long = tmp_path / "deep", tmp_path / "long"
    for folder in (deep, long):
        folder.mkdir()
    (deep / "hub.json").write_bytes(b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}")
    (long / "hub.json").write_bytes(b" " * (1 << 20) + (tmp_path / "theirs" / "hub.json").read_bytes())
    assert {run.name: run.hub is None for run in runs.list_runs(tmp_path)} == {
        "theirs": False,
        "deep": True,
        "long": True,
    }


def test_only_the_start_that_wrote_it_removes_the_hub_file(tmp_path: Path) -> None:
    add_run(tmp_path, "r", os.getpid())
    remove_hub_file(tmp_path / "r", "another")
    assert read_hub_file(tmp_path / "r").epoch == "epoch"
    remove_hub_file(tmp_path / "r", "epoch")
    assert not (tmp_path / "r" / "hub.json").exists()


def test_sockets_are_private_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = make_socket_directory()
    assert directory.parent == tmp_path and directory.stat().st_mode & 0o777 == 0o700
    check_socket_directory(directory)
    directory.chmod(0o755)
    with pytest.raises(RunError, match="mode 0700"):
        check_socket_directory(directory)


def test_a_long_runtime_directory_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    directory = make_socket_directory()
    directory.rmdir()
    assert long not in directory.parents and list(long.iterdir()) == []
    with pytest.raises(RunError, match="bytes, but the limit is 107"):
        endpoints_in(long)


def test_a_failure_is_ignored_after_a_new_start(tmp_path: Path) -> None:
    file = tmp_path / FAILURE_FILE
    forget_failure(tmp_path)
    assert not file.exists()
    file.write_text("2026-11-21 12:00:00 rank 2 was killed\n\nrank 3 had ended without an error\n")
    assert last_failure(tmp_path) == "rank 2 was killed"
    forget_failure(tmp_path)
    assert last_failure(tmp_path) is None and "rank 2 was killed" in file.read_text()
    with pytest.raises(RunError, match="it has ended, or it has no hub"):
        read_hub_file(tmp_path)
    with file.open("a") as more:
        more.write("2026-11-21 13:00:00 rank 5 was killed\n")
    assert last_failure(tmp_path) == "rank 5 was killed"


def test_jobs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    named, beside = stamped(tmp_path, "r", 0.0), tmp_path / "beside"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_folder(None, named), range(120)))
    assert len(set(made)) == 120 and named in made and all(folder.is_dir() for folder in made)
    (beside / stamped(beside, "s", 0.0).name).mkdir(parents=True)
    made = [make_folder(None, stamped(tmp_path, "s", 0.0), beside=beside, number=77) for _ in range(2)]
    assert [folder.name.rpartition("-")[2] for folder in made] == ["77", "2"]
    assert sorted(path.name for path in beside.iterdir())[1:] == sorted(folder.name for folder in made)
    assert not stamped(tmp_path, "s", 0.0).exists()
    assert make_folder(made[0], named) == made[0]
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(RunError, match="cannot create the run's folder"):
        make_folder(None, tmp_path / "link" / "r")


def test_a_copy_of_a_live_runs_folder_is_not_the_run(tmp_path: Path) -> None:
    hub = add_run(tmp_path, "live", os.getpid())
    shutil.copytree(tmp_path / "live", tmp_path / "copy", copy_function=shutil.copy2)
    shutil.copytree(tmp_path / "live" / "s", tmp_path / "copy" / "s", dirs_exist_ok=True)
    with pytest.raises(RunError, match=r"no hub serves the run .*copy: it is a copy of the folder of a run"):
        runs.resolve("copy", tmp_path)
    assert {run.name: run.live for run in runs.list_runs(tmp_path)} == {"live": True, "copy": False}
    assert runs.newest_live(tmp_path).name == "live"  # type: ignore[union-attr]
    check_readable(tmp_path / "copy")
    (tmp_path / "live").rename(tmp_path / "renamed")
    assert read_hub_file(tmp_path / "renamed") == hub


def elsewhere(tmp_path: Path, **fields: object) -> HubFile:
    """A hub file, written as if by a hub on another machine with the same host name."""
    hub = structs.replace(
        add_run(tmp_path, "r", os.getpid()), host=this_host(), started_s=time.time(), **fields
    )
    write_hub_file(tmp_path / "r", hub)
    return read_hub_file(tmp_path / "r")


def test_a_host_name_is_not_a_machine(tmp_path: Path) -> None:
    own = Machine.parse(this_machine())
    hub = elsewhere(tmp_path, machine="another.machine.1")
    assert not hub.here and not hub.live
    with pytest.raises(ElsewhereError, match="listens only there"):
        runs.resolve("r", tmp_path)
    tcp = Endpoints("tcp://10.0.0.1:5", "tcp://10.0.0.1:5")
    assert runs._reached(structs.replace(hub, tcp=tcp), tmp_path / "r") == tcp
    restarted = structs.replace(hub, machine=f"{own.installation}.another.1")
    assert not restarted.here, "a machine that was cloned, and that runs since before the hub started"
    before = structs.replace(restarted, started_s=1.0)
    assert before.here and not before.live, "this machine, before it was restarted"


def test_a_hub_in_another_container_is_here_if_its_socket_answers(tmp_path: Path) -> None:
    own = Machine.parse(this_machine())
    hub = elsewhere(tmp_path, machine=f"{own.installation}.{own.boot}.1", pid=2**22 - 1)
    assert not hub.here
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(hub.endpoints.directory / "clients"))
        listening.listen()
        assert hub.here and hub.live and runs.resolve("r", tmp_path) == hub.endpoints
    private_tmp = structs.replace(
        hub, machine=this_machine(), pid=os.getpid(), tcp=Endpoints("tcp://h:5", "t")
    )
    shutil.rmtree(hub.endpoints.directory)
    assert private_tmp.live and runs._reached(private_tmp, tmp_path / "r") == private_tmp.tcp


def test_a_process_that_has_the_id_of_an_ended_process_is_another(tmp_path: Path) -> None:
    start = process_start(os.getpid())
    assert start > 0 and process_state(os.getpid(), start) == "alive"
    assert process_state(os.getpid(), start + 1) == "ended"
    hub = elsewhere(tmp_path, machine=this_machine(), start=start)
    assert hub.live and not structs.replace(hub, start=start + 1).live


def test_only_a_folder_without_a_recording_and_without_a_message_is_removed(tmp_path: Path) -> None:
    for name, files, kept in (
        ("unused", {"hub.log": "", "commands.db": "x", "commands.db-wal": "x", ".hub.lock": ""}, False),
        ("message", {"hub.log": "the hub cannot start"}, True),
        ("recorded", {"hub.log": "", "run.db": "x"}, True),
        ("foreign", {"hub.log": "", "notes.txt": ""}, True),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for file, text in files.items():
            (folder / file).write_text(text)
        remove_unrecorded(folder)
        assert folder.exists() == kept, name
        assert not kept or {file.name for file in folder.iterdir()} == set(files)


@pytest.mark.parametrize(
    ("run", "named"),
    [
        ("a/b", "a-b"),
        (".hidden", "hidden"),
        ("/", "-"),
        ("", "run"),
        ("\U0001f600" * 64, "\U0001f600" * 50),  # 4 bytes each
        ("r\udcff", "r?"),
    ],
)
def test_a_run_of_any_name_gets_a_legal_folder(run: str, named: str, tmp_path: Path) -> None:
    assert folder_name(run) == named
    (tmp_path / f"{named}-20260101-000000-12345").mkdir()


def test_a_path_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    check_path(tmp_path / "läuft")
    with pytest.raises(RunError, match=r"the run's folder .*/r\\xffn is not legal; legal: a path in UTF-8"):
        check_path(tmp_path / os.fsdecode(b"r\xffn"))
