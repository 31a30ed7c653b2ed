"""An SQLite file in the folder of a run: whether it is still where it was opened, and what SQLite drops in silence.

Whoever cleans up a folder may remove a file that a hub has open. SQLite goes on writing to the removed file, and all of
it is lost when the hub is killed. And SQLite reads a torn or damaged write-ahead log up to the damage, without a word.
"""

import os
import sqlite3
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from agents.rundir.bounded_read import check_ordinary

BESIDE: Final = ("", "-wal", "-shm")  # the files of a database in WAL mode
HEADER: Final = struct.Struct(
    ">8I"
)  # of a log: magic, version, page size, checkpoint, two salts, two checksums
FRAME: Final = struct.Struct(">6I")  # page number, pages after a commit or 0, two salts, two checksums
RECOVERED_AT: Final = (
    16  # in the index of the log: how many frames SQLite has found to be valid and committed
)
LOOKS: Final = 5  # at what a live writer may just be about to commit
BETWEEN_S: Final = 0.1
BUSY_S: Final = 5.0


class OpenFile:
    """The files of a database that this process has open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _files(path)

    @property
    def removed(self) -> bool:
        """Whether one of them is not the file any more that its name names."""
        return _files(self.path) != self._files


def open_to_read(path: Path) -> tuple[sqlite3.Connection, str]:
    """The database, for reading, and what of it is lost, if anything, in a sentence. sqlite3.Error or OSError: there is
    none."""
    try:
        db = _opened(path, "mode=ro")
        return db, torn(db, path)
    except sqlite3.Error:
        # In a folder that cannot be written SQLite cannot share a file; as nobody writes it, it need not.
        db = _opened(path, "mode=ro&immutable=1")
    log = path.with_name(f"{path.name}-wal")
    lost = log.exists() and log.stat().st_size
    return db, f"what is in the write-ahead log {log} cannot be read here" if lost else ""


def check_files(path: Path) -> None:
    """OSError if another thing than a file lies where the database or one of its helpers should: SQLite would wait for
    the writer of a pipe."""
    check_ordinary(*(path.with_name(path.name + beside) for beside in BESIDE))


def _opened(path: Path, how: str) -> sqlite3.Connection:
    check_files(path)
    uri = f"file:{quote(str(path.absolute()))}?{how}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
    db.text_factory = readable
    try:
        db.execute("SELECT name FROM sqlite_master").fetchall()
    except sqlite3.Error:
        db.close()
        raise
    return db


def readable(text: bytes) -> str:
    """A column of text that may be damaged: one that cannot be decoded costs itself and not its table."""
    return text.decode(errors="replace")


def put_back(db: sqlite3.Connection, path: Path) -> None:
    """Write what `db` holds, whose file was removed, under its name again; `db` is closed.

    sqlite3.Error or OSError: it cannot be done, and `db` is as it was.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        copy = sqlite3.connect(unfinished)
        try:
            db.backup(copy)
        finally:
            copy.close()
    except (sqlite3.Error, OSError):
        unfinished.unlink(missing_ok=True)
        raise
    db.close()
    for beside in BESIDE[1:]:  # SQLite would take an old log for the log of the new file
        path.with_name(path.name + beside).unlink(missing_ok=True)
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def torn(db: sqlite3.Connection, path: Path) -> str:
    """What is lost of the write-ahead log of the open database `db`, in one sentence; nothing if all of it is there.

    The index of the log knows it too, but is not ours to open: closing it would drop the locks that SQLite holds on it
    in this process.
    """
    log, first = path.with_name(f"{path.name}-wal"), None
    page = int(db.execute("PRAGMA page_size").fetchone()[0])
    for look in range(LOOKS):
        if look:
            time.sleep(BETWEEN_S)
        try:
            frames = list(_frames(log, page))
        except OSError as error:
            return f"the write-ahead log {log} cannot be read: {error.strerror}"
        committed = max((frame.number for frame in frames if frame.valid and frame.commits), default=0)
        lost = [frame for frame in frames if frame.number > committed]
        if not lost or (first is not None and committed >= first):
            return ""
        first = lost[0].number
    commits = sum(frame.commits for frame in lost)
    if not commits:
        return f"the last transaction in {log} is not whole: its writer was killed, or the file was cut off"
    return f"{log} is damaged: {commits} transaction{'s' * (commits > 1)} at its end cannot be read"


@dataclass(frozen=True)
class _Frame:
    """One page in a write-ahead log; `valid`: it and all before it are as they were written."""

    number: int
    commits: bool
    valid: bool


def _frames(log: Path, page: int) -> Iterator[_Frame]:
    """The frames of this generation of the log. One that an older generation left behind has both salts different; in
    one of ours a bit may be wrong."""
    if not log.exists():
        return
    with log.open("rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            return
        magic, *_, salt, other, one, two = HEADER.unpack(head)
        order = ">" if magic & 1 else "<"
        sums = _checksum(order, head[:24], (0, 0))
        valid = sums == (one, two)
        number = 0
        while frame := file.read(FRAME.size + page):
            number += 1
            head = frame[: FRAME.size].ljust(FRAME.size, b"\0")
            _, pages, *own, one, two = FRAME.unpack(head)
            if valid:
                sums = _checksum(order, head[:8] + frame[FRAME.size :], sums)
                valid = len(frame) == FRAME.size + page and own == [salt, other] and sums == (one, two)
            if own[0] == salt or own[1] == other:
                yield _Frame(number, pages > 0, valid)


def _checksum(order: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """As SQLite's format of files has it, over whole pairs of words."""
    one, two = sums
    for first, second in struct.iter_unpack(f"{order}2I", data[: len(data) // 8 * 8]):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return one, two


def _files(path: Path) -> tuple[tuple[int, int] | None, ...]:
    return tuple(map(_identity, (path.with_name(path.name + beside) for beside in BESIDE)))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
