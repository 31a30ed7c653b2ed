"""Writes the tables of a recording; used by one thread.

Commits do not fsync (`synchronous=NORMAL`), so a power failure may lose the newest updates of a recording. It does not
change their order, and it loses no command, because the journal is a separate file with fsync.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from msgspec import Raw

from agents.protocol import VERSION
from agents.recording.database import OpenFile, put_back, torn
from agents.recording.format import SCHEMA, Batch, RecordingError, pack_row, row_of, thin, unpack_row

BUSY_S = 10.0  # maximum wait for another process that uses the file, such as a backup
WAL_BYTES = 16 << 20  # size to which the write-ahead log is truncated when it is not in use

INSERT_ROW = "INSERT INTO feed (segment, first, last, time_s, step, data) VALUES (?, ?, ?, ?, ?, ?)"
INSERT_SEGMENT = (
    "INSERT INTO segments (id, wire, epoch, seq, time_s, step, follows, thinned, snapshot) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?)"
)
CURVE = frozenset({"summary", "recalled"})  # kinds of updates that contain the curve
SIZES = (
    "SELECT id, thinned, LENGTH(snapshot) + "
    "(SELECT COALESCE(SUM(LENGTH(data)), 0) FROM feed WHERE segment = segments.id) FROM segments ORDER BY id"
)


class RecordingWriteError(Exception):
    """The recording cannot be written. The message is one sentence."""


class RecordingWriter:
    """Adds segments and rows, in order of time; `commit` writes them in one transaction."""

    def __init__(self, path: Path, full_bytes: int, thin_bytes: int) -> None:
        self._path = path
        self._limits = (full_bytes, thin_bytes)
        self._added: list[tuple[str, tuple[object, ...]]] = []
        with self._sentence():
            db = self._connect()
            self.lost = torn(db, path)  # a sentence about data that the earlier recording has lost
            db.executescript(SCHEMA)
            found = db.execute(SIZES).fetchall()
            # Size of each segment in bytes, oldest segment first.
            self._full: dict[int, int] = {id: size for id, thinned, size in found if not thinned}
            self._thin: dict[int, int] = {id: size for id, thinned, size in found if thinned}
            self._file = OpenFile(path)
        self._segment = max((*self._full, *self._thin), default=0)

    def _connect(self) -> sqlite3.Connection:
        db = self._db = sqlite3.connect(self._path, isolation_level=None, timeout=BUSY_S)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
        return db

    def put_back(self) -> bool:
        """Restore the file if it was removed; returns True in that case. RecordingWriteError: it cannot be restored."""
        if not self._file.removed:
            return False
        try:
            put_back(self._db, self._path)
            self._connect().execute(
                "SELECT id FROM segments LIMIT 1"
            ).fetchall()  # the query also opens the write-ahead log
        except (sqlite3.Error, OSError) as error:
            raise RecordingWriteError(f"{self._path} was removed and cannot be restored: {error}") from None
        self._file = OpenFile(self._path)
        return True

    @contextlib.contextmanager
    def _sentence(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            self._added.clear()
            raise RecordingWriteError(str(error)) from None

    def begin(
        self, epoch: str, seq: int, time_s: float, step: int | None, follows: bool, state: list[bytes]
    ) -> None:
        """Begin a segment with `state`: packed updates from which the state after update `seq` can be rebuilt."""
        self._segment += 1
        snapshot = pack_row([Batch(time_s, seq, list(map(Raw, state)))])
        self._full[self._segment] = len(snapshot)
        row = (self._segment, VERSION, epoch, seq, time_s, step, follows, snapshot)
        self._added.append((INSERT_SEGMENT, row))

    def add(self, batches: list[Batch], step: int | None) -> None:
        """Add a row to the newest segment, unless `batches` is empty."""
        if batches:
            row = row_of(self._segment, batches, step)
            self._full[self._segment] += len(row[-1])
            self._added.append((INSERT_ROW, row))

    def commit(self) -> None:
        """Write the added segments and rows. On a RecordingWriteError none is on disk, and they are discarded."""
        added = list(self._added)
        try:
            self._transact(added)
        except RecordingWriteError:
            for segment in [row[0] for statement, row in added if statement is INSERT_SEGMENT]:
                assert isinstance(segment, int)
                del self._full[segment]
            raise
        self._added.clear()

    def _transact(self, statements: list[tuple[str, tuple[object, ...]]]) -> None:
        with self._sentence():
            try:
                self._db.execute("BEGIN IMMEDIATE")
                for statement, row in statements:
                    self._db.execute(statement, row)
                self._db.execute("COMMIT")
            except sqlite3.Error:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    # ------------------------------------------------------------------------------------------- retention

    def make_room(self) -> None:
        """Thin the oldest full segment, and delete the oldest thinned one, if they exceed their limits.

        Each call thins and deletes at most one segment, so that new updates are written in between. The newest segment
        is never changed.
        """
        most_full, most_thin = self._limits
        if sum(self._full.values()) > most_full and len(self._full) > 1:
            oldest = next(iter(self._full))
            try:
                self._thin_out(oldest)
            except RecordingError:  # damaged and unreadable
                self._forget(oldest)
        if sum(self._thin.values()) > most_thin:
            self._forget(next(iter(self._thin)))

    def _forget(self, segment: int) -> None:
        self._transact(
            [
                ("DELETE FROM feed WHERE segment = ?", (segment,)),
                ("DELETE FROM segments WHERE id = ?", (segment,)),
            ]
        )
        self._full.pop(segment, None)
        self._thin.pop(segment, None)

    def _thin_out(self, segment: int) -> None:
        """Replace a segment by its thinned form. RecordingError: it cannot be read."""
        with self._sentence():
            rows = self._db.execute(
                "SELECT id, step, data FROM feed WHERE segment = ? ORDER BY id", (segment,)
            ).fetchall()
            snapshot, follows = self._db.execute(
                "SELECT snapshot, follows FROM segments WHERE id = ?", (segment,)
            ).fetchone()
            # If the segment continues the previous one, the earlier segments have the curve up to its start.
            snapshot = pack_row(thin(unpack_row(snapshot), CURVE if follows else frozenset()))
            kept = [batch for *_, data in rows for batch in thin(unpack_row(data))]
        size = len(snapshot)
        statements: list[tuple[str, tuple[object, ...]]] = [
            ("UPDATE segments SET thinned = 1, snapshot = ? WHERE id = ?", (snapshot, segment)),
            ("DELETE FROM feed WHERE segment = ?", (segment,)),
        ]
        if kept:
            # All updates go into one row with the first row's id, so that ids remain in order of time.
            row = row_of(segment, kept, rows[-1][1])
            size += len(row[-1])
            statements.append(
                (INSERT_ROW.replace("(segment", "(id, segment").replace("(?", "(?, ?"), (rows[0][0], *row))
            )
        self._transact(statements)
        del self._full[segment]
        self._thin[segment] = size

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
