"""``cockpit runs``: the state of each run in a folder, and a one-sentence error message for each run that cannot be
read."""

import contextlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agents.hub.recorder import Limits, Recorder
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Alert, Event, Gone, Update
from agents.rundir.hub_file import HubFile, folder_identity, read_hub_file, write_hub_file
from agents.rundir.local_machine import this_host
from agents.rundir.socket_directory import endpoints_in
from cockpit.cli.main import run
from cockpit.data.run_folders.run_list import ListedRun, RunLister, RunStatus, _order, read_run
from tests.unit.agents.fleet import make_hello, make_summary

GONE = [Gone(rank, clean=True) for rank in range(2)]


def record(folder: Path, *updates: Update, simulated: bool = False, steps: int = 5) -> Path:
    """Write a recording of a run with two ranks; `updates` are recorded last."""
    folder.mkdir(parents=True, exist_ok=True)
    log = UpdateLog()
    recorder = Recorder(
        folder / "run.db", log, Limits(segment_bytes=5000, commit_s=0.01, snapshot_multiple=0)
    )
    for rank in range(2):
        log.publish(structs.replace(make_hello(rank, 2, facts={"steps": 30}), simulated=simulated))
    for step in range(steps):
        log.publish(make_summary(step))
    for update in updates:
        log.publish(update)
    recorder.close()
    return folder


def write_hub(folder: Path, pid: int, host: str = this_host(), **more: Any) -> None:
    folder.mkdir(exist_ok=True)
    sockets = folder / "s"
    sockets.mkdir(exist_ok=True)
    write_hub_file(folder, HubFile("named", "e", endpoints_in(sockets), pid, 1, 5.0, host, **more))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run in each state."""
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path / "runs"))
    runs = tmp_path / "runs"
    record(runs / "ended", *GONE)
    record(runs / "simulated", *GONE, simulated=True)
    record(runs / "recorded", Gone(1, clean=False, process="ended"))
    record(runs / "resumed", *GONE, structs.replace(make_hello(0, 2, facts={"steps": 30})))
    record(runs / "alerted", Alert("failed", "run", "error", True, 4, 9.0, "rank 1 ran out of memory"), *GONE)
    record(runs / "failed", *GONE)
    (runs / "failed" / "failure.txt").write_text("2026-01-02 03:04:05 rank 1: \x1b[31mbroken\n")
    write_hub(record(runs / "dead"), 2**22 + 1)
    write_hub(record(runs / "live"), os.getpid())
    write_hub(record(runs / "elsewhere"), 1, host="n\x1b3")
    write_hub(runs / "bare", 2**22 + 1)
    (runs / "no-database").mkdir()
    (runs / "no-database" / "run.db").write_bytes(b"this is no database" * 100)
    (runs / "bad-hub").mkdir()
    (runs / "bad-hub" / "hub.json").write_text("{")
    record(runs / "cut", *GONE)
    with (runs / "cut" / "run.db").open("r+b") as file:
        file.truncate(5000)
    (runs / "other").mkdir()
    (runs / "other" / "notes.txt").write_text("not a run")
    (runs / "link").symlink_to(runs / "nowhere")
    os.mkfifo(runs / "pipe")
    (runs / "fifo-db").mkdir()
    os.mkfifo(runs / "fifo-db" / "run.db")
    return runs


def test_a_copy_of_a_live_run_is_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = record(tmp_path / "live")
    write_hub(live, os.getpid())
    write_hub_file(live, structs.replace(read_hub_file(live), folder=folder_identity(live)))
    shutil.copytree(live, tmp_path / "copy")
    assert run(["runs", "--dir", str(tmp_path), "--json"]) == 0
    found = by_name(capsys.readouterr().out.splitlines())
    assert {name: one["state"] for name, one in found.items()} == {"live": "live", "copy": "recorded"}


def by_name(lines: Iterable[str]) -> dict[str, dict[str, Any]]:
    records = [json.loads(line) for line in lines]
    return {Path(record["folder"]).name: record for record in records}


def test_the_state_of_each_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "--json"]) == 0
    found = by_name(capsys.readouterr().out.splitlines())
    assert {name: record["state"] for name, record in found.items()} == {
        "ended": "ended",
        "simulated": "ended",
        "recorded": "recorded",  # a rank was lost, but not the leader
        "resumed": "recorded",  # its leader came back after the end
        "alerted": "failed",
        "failed": "failed",
        "dead": "hub dead",
        "live": "live",
        "elsewhere": "elsewhere",
        "bare": "hub dead",
        "no-database": "unreadable",
        "bad-hub": "unreadable",
        "cut": "unreadable",
        "fifo-db": "unreadable",
    }
    assert next(iter(found)) == "live"
    ended = found["ended"]
    assert (ended["steps"], ended["planned"], ended["ranks"], ended["simulated"]) == (5, 30, 2, False)
    assert ended["loss"] == make_summary(4).loss and ended["age_s"] >= 0 and ended["bytes"] > 1000
    assert found["simulated"]["simulated"] is True
    assert found["alerted"]["why"] == "rank 1 ran out of memory"
    assert found["elsewhere"]["steps"] is None  # its database cannot be read from here
    for name in ("no-database", "bad-hub", "cut", "fifo-db"):
        (line,) = found[name]["why"].splitlines()
        assert "cannot be read" in line or "is not a hub file" in line or "damaged" in line


def test_the_table_is_printed_without_control_characters(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a\x1b[31m").mkdir()
    (folder / "a\x1b[31m" / "engine.log").write_text("")
    assert run(["runs", "--dir", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "steps", "loss", "age", "ranks", "size", "host"]
    assert lines[1].startswith("live")
    assert any(line.split()[:3] == ["simulated", "ended", "SIMULATED"] for line in lines)
    assert "failed: rank 1:  [31mbroken" in lines
    assert all(line.isprintable() for line in lines)


def test_missing_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path / "none"))
    assert run(["runs"]) == 0
    assert (
        capsys.readouterr().out == f"there are no runs in {tmp_path / 'none'}; start one with: cockpit demo\n"
    )
    assert run(["runs", "--dir", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("there is no folder ")
    (tmp_path / "file").write_text("")
    assert run(["runs", "--dir", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.endswith("cannot be read: Not a directory\n")


def test_runs_that_ended_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "old", *GONE)
    for path in (tmp_path / "old").iterdir():
        os.utime(path, (1e9, 1e9))
    before = sorted(os.listdir(tmp_path / "old"))
    lister = RunLister(tmp_path)
    (first,) = lister.runs()
    assert first.status is RunStatus.ENDED

    def unread(folder: Path) -> None:
        raise AssertionError("it was read again")

    with monkeypatch.context() as patch:
        patch.setattr("cockpit.data.run_folders.run_list.read_run", unread)
        assert lister.runs() == [first]
    assert sorted(os.listdir(tmp_path / "old")) == before  # a reader leaves no files behind
    (tmp_path / "old" / "failure.txt").write_text("2026-01-02 03:04:05 broken\n")
    assert lister.runs()[0].status is RunStatus.FAILED
    shutil.rmtree(tmp_path / "old")
    assert lister.runs() == []


def test_a_simulated_run_has_its_mark_from_the_first_segment_on(tmp_path: Path) -> None:
    """The snapshot of the first segment is empty, because the hub starts to record before the first rank has joined."""
    path, log = tmp_path / "run.db", UpdateLog()
    recorder = Recorder(path, log, Limits(commit_s=0.01))
    began = Event(1.0, "info", "hub", "the hub has begun")
    hellos = [structs.replace(make_hello(rank, 2, facts={"steps": 30}), simulated=True) for rank in range(2)]
    rows = 0
    for updates in ([began], hellos, *([make_summary(step)] for step in range(3))):
        for update in updates:
            log.publish(update)
        while number_of_rows(path) == rows:  # each part has its own row
            recorder.follow()
        rows = number_of_rows(path)
    found = read_run(tmp_path)
    recorder.close()
    assert (found.simulated, found.planned, found.steps) == (True, 30, 3)


def number_of_rows(path: Path) -> int:
    if not path.exists():
        return 0
    with contextlib.closing(sqlite3.connect(path)) as db, contextlib.suppress(sqlite3.OperationalError):
        return int(db.execute("SELECT COUNT(*) FROM feed").fetchone()[0])
    return 0


def test_a_long_recording_is_not_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agents.recording import glance

    record(tmp_path / "long", *GONE, steps=400)
    read: list[int] = []
    known = glance.updates_of

    def counted(data: bytes, most: int) -> Any:
        read.append(len(data))
        return known(data, most)

    monkeypatch.setattr(glance, "updates_of", counted)
    found = read_run(tmp_path / "long")
    assert (found.steps, found.status) == (400, RunStatus.ENDED)
    assert len(read) <= 1 + glance.ROWS


def test_a_folder_whose_name_is_not_utf8_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path))
    record(tmp_path / os.fsdecode(b"bad\xff"), *GONE)
    assert run(["runs"]) == 0 and "ended" in capsys.readouterr().out
    assert run(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(tmp_path / "bad\ufffd")


def test_live_runs_keep_their_order() -> None:
    """Live runs are ordered by their start, because the times of their newest data change every second."""
    first, second = (
        ListedRun(Path(name), RunStatus.LIVE, began_s=began, last_s=last)
        for name, began, last in (("new", 20.0, 30.0), ("old", 10.0, 31.0))
    )
    ended = ListedRun(Path("ended"), RunStatus.ENDED, began_s=40.0, last_s=50.0)
    assert [run.folder.name for run in sorted([ended, second, first], key=_order)] == ["new", "old", "ended"]
