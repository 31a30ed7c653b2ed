"""Restores removed SQLite files of a run, and detects damage that SQLite does not report.

If a file that a hub has open is removed, SQLite continues to write to the removed file, whose content is lost when the
hub ends. If a write-ahead log is incomplete or damaged, SQLite reads it up to the damage and reports no error.
"""

import os
import sqlite3
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from agents.rundir.bounded_read import check_ordinary, open_ordinary
from agents.transport.open_files import check_writable, replacing

BESIDE: Final = ("", "-wal", "-shm")  # suffixes of a database's files in WAL mode
# Header of a log: magic, version, page size, checkpoint, two salts, two checksums.
HEADER: Final = struct.Struct(">8I")
# Header of a frame: page number, pages after a commit or 0, two salts, two checksums.
FRAME: Final = struct.Struct(">6I")
READS: Final = 5  # number of attempts to read a log, because a live writer may be committing
BETWEEN_S: Final = 0.1
BUSY_S: Final = 5.0
QUICK_S: Final = 0.2


class Database(sqlite3.Connection):
    """A connection that reports a damaged name in the schema as sqlite3.DatabaseError, like other damage."""

    def execute(self, *query: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*query)
        except UnicodeDecodeError as error:  # the message of SQLite or the name of a column is damaged
            why = error.object.decode(errors="replace")
            raise sqlite3.DatabaseError(f"the schema is damaged: {why}") from None


class OpenFile:
    """A database that this process has opened. Remembers the device and inode of each of its files, to notice whether a
    file is replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _files(path)

    @property
    def removed(self) -> bool:
        """Whether one of the database's files has been removed or replaced since this process opened it."""
        return _files(self.path) != self._files


def open_to_read(path: Path) -> tuple[sqlite3.Connection, str]:
    """The database, opened read-only, and a message that says which data is lost ("" if none is). Raises sqlite3.Error
    or OSError if the database cannot be opened.
    """
    try:
        db = _opened(path, "mode=ro")
        return db, torn(db, path)
    except sqlite3.Error:
        # To share a file between processes, SQLite needs a writable folder. No process writes this file, so it can be
        # opened as immutable.
        db = _opened(path, "mode=ro&immutable=1")
    log = path.with_name(f"{path.name}-wal")
    lost = log.exists() and log.stat().st_size
    return db, f"the write-ahead log {log} cannot be read here" if lost else ""


def open_unchecked(path: Path) -> tuple[sqlite3.Connection, str]:
    """The database, opened read-only for a quick look: lost data is not detected, and a busy database causes an error
    at once. Raises sqlite3.Error or OSError if the database cannot be opened.
    """
    log = path.with_name(f"{path.name}-wal")
    if not log.exists():  # otherwise SQLite would create the log and its index in the folder just to read
        return _opened(path, "mode=ro&immutable=1", QUICK_S), ""
    try:
        return _opened(path, "mode=ro", QUICK_S), ""
    except sqlite3.Error:
        return _opened(path, "mode=ro&immutable=1", QUICK_S), ""


def check_files(path: Path, written: bool = False) -> None:
    """Raise OSError if one of the database's files is not a regular file, because SQLite would block on a pipe. If the
    database is to be written, the files must not be links either; raises sqlite3.OperationalError then."""
    files = [path.with_name(path.name + beside) for beside in BESIDE]
    if not written:
        return check_ordinary(*files)
    try:
        return check_writable(*files)
    except OSError as error:
        raise sqlite3.OperationalError(error.strerror) from None


def _opened(path: Path, how: str, busy_s: float = BUSY_S) -> sqlite3.Connection:
    check_files(path)
    uri = f"file:{quote(os.fsencode(path.absolute()))}?{how}"
    db = sqlite3.connect(
        uri, uri=True, isolation_level=None, check_same_thread=False, timeout=busy_s, factory=Database
    )
    db.text_factory = readable
    try:
        db.execute("SELECT name FROM sqlite_master").fetchall()
    except sqlite3.Error:
        db.close()
        raise
    return db


def readable(text: bytes) -> str:
    """Decode a text column that may be damaged, so that one bad value does not make the whole table unreadable."""
    return text.decode(errors="replace")


def put_back(db: sqlite3.Connection, path: Path) -> None:
    """Restore the removed file of `db` from its open connection, and close `db`.

    Raises sqlite3.Error or OSError if the file cannot be restored; `db` then remains open and unchanged.
    """
    with replacing(path) as unfinished:
        copy = sqlite3.connect(unfinished)
        try:
            db.backup(copy)
        finally:
            copy.close()
        db.close()
        for beside in BESIDE[1:]:  # SQLite would apply the old log to the new file
            path.with_name(path.name + beside).unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def torn(db: sqlite3.Connection, path: Path) -> str:
    """One sentence about lost transactions in the write-ahead log of `db`; "" if there are none.

    The number of committed frames is also in the log's index file, but this function must not open that file: closing
    it would release SQLite's locks in this process.
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
            f"the last transaction in {log} is incomplete: its writer was killed, the disk was full, or the file was "
            "truncated"
        )
    return f"{log} is damaged: {commits} transaction{'s' * (commits > 1)} at its end cannot be read"


@dataclass(frozen=True)
class _Frame:
    """A frame in a write-ahead log: one page of the database. `valid`: the checksums of this and all earlier frames are
    correct.
    """

    number: int
    commits: bool
    valid: bool


def _frames(log: Path, page: int) -> Iterator[_Frame]:
    """The frames that were written to the log since SQLite last restarted it. Older frames, which SQLite overwrites one
    by one, contain other salts."""
    if not log.exists():
        return
    with open_ordinary(log) as file:
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
    """The checksum defined by SQLite's write-ahead log format, over pairs of 32-bit words."""
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
