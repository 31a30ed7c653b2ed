"""The standard streams of a run, and what its folder keeps of them."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.launch.outlet import LOG, STDOUT, Outlet, copy_to, outlet


@contextmanager
def stdout(descriptor: int) -> Iterator[Outlet]:
    """An outlet for `sys.stdout`, which writes to `descriptor`."""
    before, python = os.dup(STDOUT), sys.stdout
    os.dup2(descriptor, STDOUT)
    os.close(descriptor)
    sys.stdout = outlet()
    try:
        yield sys.stdout.buffer.raw
    finally:
        os.dup2(before, STDOUT)
        os.close(before)
        sys.stdout = python


def broken() -> int:
    """A pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_the_run_folder_has_what_nobody_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stdout(broken()):
        copy_to(tmp_path)
        for step in range(3):
            sys.stdout.write(f"step {step}\n")
    log = tmp_path / LOG
    assert log.read_text() == "step 0\nstep 1\nstep 2\n"
    told = (
        f"standard output is closed, its reader has left; the run continues without it; {log} has the rest\n"
    )
    assert capsys.readouterr().err == told


def test_a_forked_process_keeps_what_its_parent_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stdout(broken()):
        sys.stdout.write("step 0\n")
        copy_to(tmp_path)
        sys.stdout = outlet()
        sys.stdout.write("step 1\n")
    assert capsys.readouterr().err.count("\n") == 1 and (tmp_path / LOG).read_text() == "step 1\n"


def test_a_stream_that_goes_there_already_is_not_written_twice(tmp_path: Path) -> None:
    with stdout(os.open(tmp_path / LOG, os.O_WRONLY | os.O_CREAT)):
        copy_to(tmp_path)
        sys.stdout.write("step 0\n")
    assert (tmp_path / LOG).read_text() == "step 0\n"


def test_what_is_no_file_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither waited for nor written through."""
    pipe, link, other = tmp_path / "pipe", tmp_path / "link", tmp_path / "other"
    pipe.mkdir()
    link.mkdir()
    os.mkfifo(pipe / LOG)
    (link / LOG).symlink_to(other)
    with stdout(broken()) as raw:
        for folder in (pipe, link):
            copy_to(folder)
            assert raw.log is None
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("cannot be written" in line for line in said) and not other.exists()


def test_a_log_that_cannot_be_written_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stdout(broken()) as raw:
        copy_to(tmp_path / "absent")
        assert raw.log is None
    assert f"{tmp_path / 'absent' / LOG} cannot be written: No such file" in capsys.readouterr().err
