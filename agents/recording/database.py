"""SQLite files in a run's folder: removed files, and damage that SQLite does not report.

If somebody removes a file that a hub has open, SQLite continues to write to the removed file, and all of it is lost
when the hub is killed. SQLite also reads a torn or damaged write-ahead log up to the damage without an error.
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

BESIDE: Final = ("", "-wal", "-shm")  # suffixes of the files of a database in WAL mode
HEADER: Final = struct.Struct(
    ">8I"
)  # header of a log: magic, version, page size, checkpoint, two salts, two checksums
FRAME: Final = struct.Struct(
    ">6I"
)  # of a frame: page number, pages after a commit or 0, two salts, two checksums
RECOVERED_AT: Final = (
    16  # in the index of the log: the number of frames that SQLite knows as valid and committed
)
READS: Final = 5  # attempts to read a log, because a live writer may be about to commit
BETWEEN_S: Final = 0.1
BUSY_S: Final = 5.0


class OpenFile:
    """The files of a database that this process has open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _files(path)

    @property
    def removed(self) -> bool:
        """Whether one of the names no longer refers to the open file."""
        return _files(self.path) != self._files


def open_to_read(path: Path) -> tuple[sqlite3.Connection, str]:
    """The database opened read-only, and a sentence about lost data if there is any. sqlite3.Error or OSError: it
    cannot be opened."""
    try:
        db = _opened(path, "mode=ro")
        return db, torn(db, path)
    except sqlite3.Error:
        # SQLite needs a writable folder to share a file. No process writes this one, so it can be opened as immutable.
        db = _opened(path, "mode=ro&immutable=1")
    log = path.with_name(f"{path.name}-wal")
    lost = log.exists() and log.stat().st_size
    return db, f"the write-ahead log {log} cannot be read here" if lost else ""


def check_files(path: Path) -> None:
    """OSError if the database or one of its helper files is not a regular file: SQLite would block on a pipe."""
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
    """Decode a text column that may be damaged, so that one bad value does not make its table unreadable."""
    return text.decode(errors="replace")


def put_back(db: sqlite3.Connection, path: Path) -> None:
    """Restore the removed file of `db` from its open connection, and close `db`.

    sqlite3.Error or OSError: that failed, and `db` is unchanged.
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
    """One sentence about lost transactions in the write-ahead log of `db`; "" if there are none.

    The index of the log has this too, but it must not be opened here: closing it would drop SQLite's locks in this
    process.
    """
    log, first = path.with_name(f"{path.name}-wal"), None
    page = int(db.execute("PRAGMA page_size").fetchone()[0])
    for attempt in range(READS):
        if attempt:
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
        return (
            f"the last transaction in {log} is incomplete: its writer was killed, or the file was truncated"
        )
    return f"{log} is damaged: {commits} transaction{'s' * (commits > 1)} at its end cannot be read"


@dataclass(frozen=True)
class _Frame:
    """One page in a write-ahead log; `valid`: the checksums of this and all earlier frames are right."""

    number: int
    commits: bool
    valid: bool


def _frames(log: Path, page: int) -> Iterator[_Frame]:
    """The frames of the current generation of the log. A frame of an older generation differs in both salts."""
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
    """The checksum of SQLite's file format, over pairs of 32-bit words."""
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
