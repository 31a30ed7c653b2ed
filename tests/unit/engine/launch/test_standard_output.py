"""The standard streams of a run and their copy in the run's folder."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.launch.processes.standard_output import (
    LOG,
    STDERR,
    STDOUT,
    LogFile,
    StandardStream,
    copy_to,
    standard_stream,
)


@contextmanager
def stdout(descriptor: int) -> Iterator[StandardStream]:
    """Replace `sys.stdout` with a `StandardStream` that writes to `descriptor`."""
    before, python = os.dup(STDOUT), sys.stdout
    os.dup2(descriptor, STDOUT)
    os.close(descriptor)
    sys.stdout = standard_stream()
    try:
        yield sys.stdout.buffer.raw
    finally:
        os.dup2(before, STDOUT)
        os.close(before)
        sys.stdout = python


def broken_pipe() -> int:
    """The write end of a pipe whose read end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_the_log_has_the_output_after_the_reader_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stdout(broken_pipe()):
        copy_to(tmp_path)
        for step in range(3):
            sys.stdout.write(f"step {step}\n")
    log = tmp_path / LOG
    assert log.read_text() == "step 0\nstep 1\nstep 2\n"
    warning = (
        "cannot write to standard output: its reader has closed it; the run continues without it; "
        f"{log} has the remaining output\n"
    )
    assert capsys.readouterr().err == warning


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_log_on_a_full_disk_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "output").touch()
    log = LogFile(Path("/dev/full"))
    with stdout(os.open(tmp_path / "output", os.O_WRONLY)) as stream:
        monkeypatch.setattr("sys.stderr", standard_stream(STDERR))
        sys.stderr.buffer.raw.log = log  # type: ignore[attr-defined]
        stream.log = log
        sys.stderr.write("a warning\n")
        for step in range(3):
            sys.stdout.write(f"step {step}\n")
    assert (tmp_path / "output").read_text() == "step 0\nstep 1\nstep 2\n", "the run continues"
    warning = (
        "cannot write /dev/full: No space left on device; the run continues, but output is missing there\n"
    )
    assert sorted(capfd.readouterr().err.splitlines(True)) == ["a warning\n", warning]


class Disk(LogFile):
    """A log on a disk with `room` free bytes."""

    room = 4

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = memoryview(data)[: self.room]
        self.room -= len(part)
        return super().write(part)


def test_the_log_says_where_output_is_missing(tmp_path: Path) -> None:
    log = Disk(tmp_path / LOG)
    for line, room in ((b"step 0\n", 4), (b"step 1\n", 0), (b"step 2\n", 999), (b"step 3\n", 999)):
        log.room = room
        log.append(memoryview(line))
    gap = "\n[10 bytes of output are missing here]\n"
    assert (tmp_path / LOG).read_text() == f"step{gap}step 2\nstep 3\n"


def test_a_forked_process_shares_the_failure_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stdout(broken_pipe()):
        sys.stdout.write("step 0\n")
        copy_to(tmp_path)
        sys.stdout = standard_stream()
        sys.stdout.write("step 1\n")
    assert capsys.readouterr().err.count("\n") == 1 and (tmp_path / LOG).read_text() == "step 1\n"


def test_a_stream_already_redirected_to_the_log_is_not_written_twice(tmp_path: Path) -> None:
    with stdout(os.open(tmp_path / LOG, os.O_WRONLY | os.O_CREAT)):
        copy_to(tmp_path)
        sys.stdout.write("step 0\n")
    assert (tmp_path / LOG).read_text() == "step 0\n"


def test_a_pipe_or_a_link_is_not_used_as_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Opening a named pipe in place of the log does not block, and the target of a symbolic link in its place is not
    created."""
    pipe, link, other = tmp_path / "pipe", tmp_path / "link", tmp_path / "other"
    pipe.mkdir()
    link.mkdir()
    os.mkfifo(pipe / LOG)
    (link / LOG).symlink_to(other)
    with stdout(broken_pipe()) as raw:
        for folder in (pipe, link):
            copy_to(folder)
            assert raw.log is None
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2 and all(line.startswith("cannot write ") for line in warnings)
    assert not other.exists()


def test_a_log_that_cannot_be_opened_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stdout(broken_pipe()) as raw:
        copy_to(tmp_path / "absent")
        assert raw.log is None
    assert f"cannot write {tmp_path / 'absent' / LOG}: No such file" in capsys.readouterr().err
