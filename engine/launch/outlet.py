"""Standard output of a run: a failed write never ends the run, and a copy goes to the run's folder."""

import io
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from agents.rundir.hub_supervisor import say

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

LOG = "engine.log"  # in the run's folder
STDOUT, STDERR = 1, 2
# Opening a pipe without a reader is an error instead of a wait; symbolic links are not followed.
APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW


class Outlet(io.FileIO):
    """A standard stream whose failure does not end the run: a closed pipe (``| head -4``) or a full disk.

    The first failed write to stdout is reported on stderr, once for a process and its forks.
    """

    def __init__(self, descriptor: int, failed: mmap.mmap, log: io.FileIO | None = None):
        super().__init__(descriptor, "w", closefd=False)
        self.failed, self.log = failed, log

    def write(self, data: "Buffer") -> int:
        view = memoryview(data).cast("B")
        written = self._write(view)
        if self.log is not None:
            with suppress(OSError):
                self.log.write(view[:written])
        return written

    def _write(self, view: memoryview) -> int:
        """Write to the stream and return the bytes handled: all of them once the stream has failed."""
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
        why = "its reader has left" if closed else f"it cannot be written: {error.strerror}"
        instead = f"; {self.log.name} has the rest" if self.log is not None else ""
        say(f"standard output is closed, {why}; the run continues without it{instead}\n")


def outlet(descriptor: int = STDOUT) -> io.TextIOWrapper:
    """A line-buffered `sys.stdout` or `sys.stderr` over an `Outlet`.

    It shares the state of an existing outlet, such as that of the parent of a forked process.
    """
    before = _outlet_of(sys.stdout if descriptor == STDOUT else sys.stderr)
    raw = Outlet(descriptor, before.failed, before.log) if before else Outlet(descriptor, mmap.mmap(-1, 1))
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def copy_to(folder: Path) -> None:
    """Append all further output of this process to ``engine.log`` in `folder` too."""
    path = folder / LOG
    try:
        log = io.FileIO(os.open(path, APPENDING, 0o666), "w")
        log.name = str(path)
    except OSError as error:
        say(f"{path} cannot be written: {error.strerror}; the run continues without it\n")
        return
    for stream in (sys.stdout, sys.stderr):
        raw = _outlet_of(stream)
        # A launcher such as the demo may have redirected the stream to this file already.
        if raw and not os.path.samestat(os.fstat(raw.fileno()), os.fstat(log.fileno())):
            stream.flush()
            raw.log = log


def _outlet_of(stream: TextIO) -> Outlet | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, Outlet) else None
