"""Standard output of a run. A failed write does not end the run, and the output is also written to `engine.log` in the
run's folder."""

import io
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from agents.rundir.hub_supervisor import say
from agents.transport.open_files import descriptor_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

LOG = "engine.log"  # name of the file in the run's folder
STDOUT, STDERR = 1, 2


class LogFile(io.FileIO):
    """The file ``engine.log``. The first failed write is reported on stderr, once for a process and all its forks.
    Later output is still written if possible, after a line that gives the number of bytes that this process could not
    write.
    """

    def __init__(self, path: Path):
        super().__init__(descriptor_of(path, os.O_WRONLY | os.O_APPEND), "w")
        self.name = str(path)
        self.failed = mmap.mmap(-1, 1)
        self._missing = 0

    def append(self, view: memoryview) -> None:
        """Write as much of `view` as the file accepts."""
        gap = f"\n[{self._missing} bytes of output are missing here]\n".encode() if self._missing else b""
        written = self._write_part(memoryview(gap + view))
        if written >= len(gap):
            self._missing = 0
        self._missing += len(view) - max(0, written - len(gap))

    def _write_part(self, view: memoryview) -> int:
        """Write as much of `view` as the file accepts, and return the number of bytes written."""
        done = 0
        try:
            while done < len(view) and (
                written := self.write(view[done:])
            ):  # a nearly full disk accepts a part
                done += written
        except OSError as error:
            if not self.failed[0]:
                self.failed[0] = 1
                why = f"{error.strerror}; the run continues, but output is missing there"
                # Not through `sys.stderr`, which may be the stream whose output is being written.
                with suppress(OSError):
                    os.write(STDERR, f"cannot write {self.name}: {why}\n".encode(errors="backslashreplace"))
        return done


class StandardStream(io.FileIO):
    """A standard stream that ignores failed writes, such as to a closed pipe (``| head -4``) or a full disk.

    The first failed write to stdout is reported on stderr, once for a process and all its forks.
    """

    def __init__(self, descriptor: int, failed: mmap.mmap, log: LogFile | None = None):
        super().__init__(descriptor, "w", closefd=False)
        self.failed, self.log = failed, log

    def write(self, data: "Buffer") -> int:
        view = memoryview(data).cast("B")
        written = self._write(view)
        if self.log is not None:
            self.log.append(view[:written])
        return written

    def _write(self, view: memoryview) -> int:
        """Write to the stream and return the number of bytes written; after a failure, discard the bytes but return
        their count."""
        if self.failed[0]:
            return len(view)
        try:
            return super().write(view)
        except OSError as error:
            self.failed[0] = 1
            if self.fileno() != STDERR:
                self._report(error)
            return len(view)

    def _report(self, error: OSError) -> None:
        closed = isinstance(error, BrokenPipeError)
        why = "its reader has closed it" if closed else error.strerror
        instead = f"; {self.log.name} has the remaining output" if self.log is not None else ""
        say(f"cannot write to standard output: {why}; the run continues without it{instead}\n")


def standard_stream(descriptor: int = STDOUT) -> io.TextIOWrapper:
    """A line-buffered text stream over a `StandardStream`, to replace `sys.stdout` or `sys.stderr`.

    The new stream shares the failure flag and the log with the stream that it replaces, so a forked rank shares both
    with its parent.
    """
    before = _stream_of(sys.stdout if descriptor == STDOUT else sys.stderr)
    raw = (
        StandardStream(descriptor, before.failed, before.log)
        if before
        else StandardStream(descriptor, mmap.mmap(-1, 1))
    )
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def copy_to(folder: Path) -> None:
    """Also append all further output of this process to ``engine.log`` in `folder`."""
    path = folder / LOG
    try:
        log = LogFile(path)
    except OSError as error:
        say(f"cannot write {path}: {error.strerror}; the run continues without it\n")
        return
    for stream in (sys.stdout, sys.stderr):
        raw = _stream_of(stream)
        # If a launcher such as the demo has already redirected the stream to this file, do not write everything twice.
        if raw and not os.path.samestat(os.fstat(raw.fileno()), os.fstat(log.fileno())):
            stream.flush()
            raw.log = log


def _stream_of(stream: TextIO) -> StandardStream | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, StandardStream) else None
