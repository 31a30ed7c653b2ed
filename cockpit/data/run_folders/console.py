"""The console output of a run: finds its files in the run's folder, and reads the end of each in bounded memory.

The files are written by other programs, so escape codes and control characters are removed from all text.
"""

import os
import re
import threading
from collections import deque
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from agents.rundir.bounded_read import open_ordinary
from agents.rundir.failure_file import FAILURE_FILE
from agents.rundir.runs import HUB_LOG
from cockpit.data import format
from cockpit.data.sources.engine_process import LOG

FIRST_BYTES = 1 << 20  # number of bytes read from the end of the file when it is opened
MORE_BYTES = 1 << 20  # maximum number of bytes of one later read; if more were added, the oldest are skipped
MOST_LINES = 20_000
POLL_S = 0.5
LONGEST_LINE = 2_000  # maximum number of characters of a line that are kept

FILES = {
    LOG: "what the engine and its ranks printed",
    HUB_LOG: "what the hub printed",
    FAILURE_FILE: "why the run failed, with the reports of the ranks",
}
"""The files of a run's folder with its output, and what each holds."""

# CSI, OSC and other string sequences up to their end, two-character escapes, and a lone escape.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
    r"|\x1b[ -/]*[0-~]"
    r"|\x1b|\x9b[0-?]*[ -/]*[@-~]"
)


def plain_line(line: str) -> str:
    """One line of terminal output as plain text, without escape codes and without the text before the last carriage
    return, so that only the last state of a progress bar remains."""
    line = line.rstrip("\r\n")
    if "\r" in line:
        line = next((part for part in reversed(line.split("\r")) if part.strip()), "")
    text = format.clean(_ESCAPES.sub("", line.expandtabs(8)))
    return text if len(text) <= LONGEST_LINE else f"{text[: LONGEST_LINE - 1]}…"


def console_files(folder: Path) -> list[Path]:
    """The console output files that exist in a run's folder, in the order of `FILES`."""
    return [folder / name for name in FILES if os.path.lexists(folder / name)]


@dataclass(frozen=True)
class Line:
    """One line of a console output file. `number`: the index of the line among the lines that were read, from 0."""

    number: int
    text: str


class Tail:
    """The last lines of a growing file. `poll` reads what was appended, at most 1 MiB per call.

    One thread polls; another may read the attributes, which are replaced as a whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: tuple[Line, ...] = ()
        self.problem = ""  # one sentence that says why the file cannot be read
        self.unread_bytes = 0  # bytes of the file, before the last line, that were not read
        self._identity: tuple[int, int] | None = None  # device and inode of the file that was read
        self._at = 0  # position in the file
        self._rest = b""  # the last line, while its end is not written yet
        self._whole: deque[Line] = deque(maxlen=MOST_LINES)
        self._count = 0

    def poll(self) -> None:
        """Read what was added to the file; if the file was replaced or truncated, start again from its beginning."""
        try:
            with open_ordinary(self.path) as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._at:
                    self._identity = status.st_dev, status.st_ino
                    self._at, self._rest, self.unread_bytes = 0, b"", 0
                    self._whole.clear()
                    self.lines = ()
                if status.st_size > self._at:
                    self._read(file, status.st_size)
                self.problem = ""
        except OSError as error:
            self.problem = f"{self.path} cannot be read: {error.strerror or error}"

    def _read(self, file: FileIO, size: int) -> None:
        """Read the bytes added to the file, up to offset `size`. If too many bytes were added, read only the last ones
        and drop the partial first line."""
        skipped = size - self._at - (MORE_BYTES if self._at else FIRST_BYTES)
        if skipped > 0:
            self.unread_bytes += skipped
            self._rest = b""
            self._at += skipped
        file.seek(self._at)
        data = self._rest + (file.read(size - self._at) or b"")
        self._at = file.tell()
        if skipped > 0:
            cut, newline, rest = data.partition(b"\n")
            if newline:
                self.unread_bytes += len(cut) + 1
                data = rest
        *whole, self._rest = data.split(b"\n")
        self._rest = self._rest[-MORE_BYTES:]
        for raw in whole:
            self._whole.append(self._line(raw))
        unfinished = (self._line(self._rest, count=False),) if self._rest else ()
        self.lines = (*self._whole, *unfinished)

    def _line(self, raw: bytes, count: bool = True) -> Line:
        number = self._count
        self._count += count
        return Line(number, plain_line(raw.decode(errors="replace")))


class Console:
    """The output files of a run, read by a separate thread while they are visible, because a network disk may hang.

    `folder`: the run's folder; None if it is not on this machine.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.files: list[Path] = []
        self.tail: Tail | None = None
        self.revision = 0  # changes whenever the content to show changes
        self.read_once = False
        self._chosen: Path | None = None
        self._wanted = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Start reading the output files; called when a screen begins to show them."""
        if self.folder is None:
            return
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cockpit-console", daemon=True)
            self._thread.start()

    def next_file(self) -> None:
        """Switch to the next of `files`; after the last comes the first."""
        if len(self.files) > 1 and self.tail:
            at = self.files.index(self.tail.path) if self.tail.path in self.files else -1
            self._chosen = self.files[(at + 1) % len(self.files)]
            self._wanted.set()

    def read(self) -> None:
        """Look for output files, and read the data appended to the chosen file (by default the first) since the last
        call."""
        if self.folder is None:
            return
        before = self._version()
        self.files = console_files(self.folder)
        chosen = self._chosen if self._chosen in self.files else next(iter(self.files), None)
        if chosen is None:
            self.tail = None
        else:
            if self.tail is None or self.tail.path != chosen:
                self.tail = Tail(chosen)
            self.tail.poll()
        if self._version() != before or not self.read_once:
            self.read_once = True
            self.revision += 1

    def _version(self) -> tuple[object, ...]:
        tail = self.tail
        lines = tail.lines if tail else ()
        return self.files, tail and tail.path, tail and tail.problem, len(lines), lines[-1:]

    def stop(self) -> None:
        self._stop.set()
        self._wanted.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wanted.wait()
            self._wanted.clear()
            if not self._stop.is_set():
                self.read()
                self._stop.wait(POLL_S)
