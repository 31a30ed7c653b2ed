"""The standard streams of a run, the output process in front of them, and their copy in the run's folder."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.launch.processes.line_queues import LogQueue
from engine.launch.processes.standard_output import LOG
from tests.unit.cockpit.schemas import check

SETUP = """
import os, select, sys
from pathlib import Path
from agents.rundir.standard_streams import open_streams
from engine.launch.processes import line_queues
from engine.launch.processes.standard_output import StandardOutput
if "impatient" in sys.argv:
    line_queues.PATIENCE_S = line_queues.IDLE_S = 0.1
open_streams()
folder = Path(sys.argv[1])
def lines(first, count):
    for number in range(first, first + count):
        print('{"line": %d, "filling": "%s"}' % (number, 80 * "x"))
def go_on():
    (folder / "waits").touch()
    sys.stdin.readline()
with StandardOutput(as_json=True) as standard_output:
    if "log" in sys.argv:
        standard_output.copy_to(folder)
"""
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


class Script:
    """A process that runs `body` with an output process in front of its standard streams."""

    def __init__(self, folder: Path, body: str, *words: str, stdout: int = subprocess.PIPE, **more: Any):
        self.folder = folder
        program = SETUP + "".join(f"    {line}\n" for line in body.strip().splitlines())
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(folder), *words],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=more.pop("stderr", subprocess.PIPE),
            **more,
        )

    def until_it_waits(self) -> None:
        while not (self.folder / "waits").exists():
            assert self.process.poll() is None
            time.sleep(0.01)

    def go_on(self) -> tuple[str, str]:
        """Let the script continue, and return all that it prints."""
        output, errors = self.process.communicate(b"\n", 60)
        return (output or b"").decode(), (errors or b"").decode()

    @property
    def log(self) -> list[str]:
        return (self.folder / LOG).read_text().splitlines()


def numbers(lines: list[str]) -> list[int]:
    return [record["line"] for record in map(json.loads, lines) if "line" in record]


def test_a_reader_that_pauses_gets_every_line(tmp_path: Path) -> None:
    script = Script(tmp_path, "lines(0, 20_000)")  # 2 MB, more than the pipes and the queue hold
    time.sleep(1)
    output, errors = script.go_on()
    assert numbers(output.splitlines()) == list(range(20_000)) and not errors


def test_an_output_that_nobody_reads(tmp_path: Path) -> None:
    """The process ends. Its reader, which returns later, gets whole lines; the log has all of them."""
    script = Script(tmp_path, "lines(0, 20_000)", "log", "impatient")
    assert script.process.wait(60) == 0
    output, errors = script.go_on()
    read = numbers(output.splitlines())
    assert read == list(range(len(read))) and len(read) < 20_000
    told = [line for line in script.log if not line.startswith("{")]
    assert numbers([line for line in script.log if line.startswith("{")]) == list(range(20_000))
    assert [line.partition(":")[0] for line in told] == ["nobody reads standard output"] * 2
    assert "lines are dropped there" in told[0] and "the last lines are missing" in told[1]
    assert errors == f"{told[0]}\n"


def test_a_reader_that_returns_is_told_how_many_lines_are_missing(tmp_path: Path) -> None:
    body = """
    lines(0, 20_000)
    print(standard_output.take_loss() is not None, standard_output.take_loss(), file=sys.stderr)
    go_on()
    number = 20_000
    while not select.select([0], [], [], 0.01)[0]:
        lines(number, 1)
        number += 1
    """
    script = Script(tmp_path, body.replace("\n    ", "\n"), "impatient")
    script.until_it_waits()
    assert script.process.stdin and script.process.stdout and script.process.stderr
    script.process.stdin.write(b"\n")
    script.process.stdin.flush()
    records: list[dict[str, int]] = []
    while not records or "lines" not in records[-1]:
        records.append(json.loads(script.process.stdout.readline()))
    script.process.stdin.close()
    records += map(json.loads, script.process.stdout)
    errors = script.process.stderr.read().decode()
    missing = sum(record.get("lines", 0) for record in records)
    check("engine-run", *(record for record in records if "lines" in record))
    read = [record["line"] for record in records if "line" in record]
    assert read[-1] >= 20_000 and missing + len(read) == read[-1] + 1
    assert errors.splitlines()[-1] == "True None", "the loss is an event, once"


def test_two_streams_that_nobody_reads(tmp_path: Path) -> None:
    """Also writes that do not come from Python, and those of child processes, do not block."""
    body = "lines(0, 9_000)\nos.write(2, 400_000 * b'C\\n')\nos.system('yes | head -n 300000 >&2')"
    script = Script(tmp_path, body, "log", "impatient")
    assert script.process.wait(60) == 0
    other = [line for line in script.log if line[:1] in ("C", "y")]
    assert other.count("C") == 400_000 and other.count("y") == 300_000
    script.go_on()


def test_one_file_for_both_streams_keeps_their_order(tmp_path: Path) -> None:
    body = "for n in range(300): print(n, file=(sys.stdout, sys.stderr)[n % 2])"
    output, _ = Script(tmp_path, body, "log", stderr=subprocess.STDOUT).go_on()
    assert output.splitlines() == (tmp_path / LOG).read_text().splitlines() == [f"{n}" for n in range(300)]


def test_the_output_of_a_killed_process_is_written(tmp_path: Path) -> None:
    body = "lines(0, 300)\nsys.stdout.flush()\nos.kill(os.getpid(), 9)"
    script = Script(tmp_path, body, "log")
    output, _ = script.go_on()
    assert numbers(output.splitlines()) == numbers(script.log) == list(range(300))


def closed_pipe() -> int:
    """The write end of a pipe whose read end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


BROKEN: list[tuple[Callable[[], int], str]] = [
    (closed_pipe, "its reader has closed it"),
    pytest.param(lambda: os.open("/dev/full", os.O_WRONLY), "No space left on device", marks=needs_full),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("opened", "why"), BROKEN)
def test_the_log_has_the_output_that_standard_output_does_not_accept(
    tmp_path: Path, opened: Callable[[], int], why: str
) -> None:
    output = opened()
    body = (
        "if os.fork() == 0:\n    lines(0, 3)\n    sys.stdout.flush()\n    os._exit(0)\nos.wait()\nlines(3, 3)"
    )
    script = Script(tmp_path, body, "log", stdout=output)
    os.close(output)
    _, errors = script.go_on()
    warning = (
        f"cannot write to standard output: {why}; the run continues without it; "
        f"{tmp_path / LOG} has the remaining output\n"
    )
    assert errors == warning, "once, for the run and all its ranks"
    assert numbers([line for line in script.log if line.startswith("{")]) == list(range(6))
    assert script.process.returncode == 0


def test_a_stream_already_redirected_to_the_log_is_not_written_twice(tmp_path: Path) -> None:
    output = os.open(tmp_path / LOG, os.O_WRONLY | os.O_CREAT)
    Script(tmp_path, "lines(0, 3)", "log", stdout=output).go_on()
    os.close(output)
    assert numbers((tmp_path / LOG).read_text().splitlines()) == [0, 1, 2]


@pytest.mark.parametrize("obstacle", ["pipe", "link", "absent", "unread pipe"])
def test_a_log_that_cannot_be_used_does_not_end_the_run(tmp_path: Path, obstacle: str) -> None:
    """Opening a named pipe in place of the log does not block, also if nobody reads the pipe, and the target of a
    symbolic link in its place is not created."""
    folder = tmp_path / "run"
    reader = None
    if obstacle != "absent":
        folder.mkdir()
    if obstacle.endswith("pipe"):
        os.mkfifo(folder / LOG)
        reader = os.open(folder / LOG, os.O_RDONLY | os.O_NONBLOCK) if obstacle == "unread pipe" else None
    elif obstacle == "link":
        (folder / LOG).symlink_to(tmp_path / "other")
    output, errors = Script(folder, "lines(0, 2_000)", "log").go_on()
    assert numbers(output.splitlines()) == list(range(2_000))
    assert errors.count("\n") == 1 and errors.startswith(f"cannot write {folder / LOG}: ")
    assert not (tmp_path / "other").exists()
    if reader is not None:
        os.close(reader)


@needs_full
def test_a_log_on_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    errors: list[str] = []
    log = LogQueue(os.open("/dev/full", os.O_WRONLY), "/dev/full", errors.append)
    for step in range(3):
        log.put(f"step {step}\n".encode())
    assert log.flush(time.monotonic(), time.monotonic() + 60)
    warning = (
        "cannot write /dev/full: No space left on device; the run continues, but output is missing there\n"
    )
    assert errors == [warning]


class Disk:
    """Stands for `os.write` to a disk with `room` free bytes."""

    room = 4

    def __init__(self) -> None:
        self.write_part = os.write

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[: self.room]
        self.room -= len(part)
        return self.write_part(descriptor, part)


def test_the_log_says_where_output_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, file = Disk(), os.open(tmp_path / LOG, os.O_WRONLY | os.O_CREAT)
    log = LogQueue(file, LOG, lambda _: None)
    monkeypatch.setattr("engine.launch.processes.line_queues.os.write", disk.write)
    for line, room in ((b"step 0\n", 4), (b"step 1\n", 0), (b"step 2\n", 999), (b"step 3\n", 999)):
        disk.room = room
        log.put(line)
        assert log.flush(time.monotonic(), time.monotonic() + 60)
    gap = "\n[10 bytes of output are missing here]\n"
    assert (tmp_path / LOG).read_text() == f"step{gap}step 2\nstep 3\n"
