"""Writes the tables of a recording; used by one thread.

Commits do not fsync (`synchronous=NORMAL`), so a power failure may lose the newest updates of a recording, but no
earlier ones. No command is lost, because the journal is a separate file that is written with fsync.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from msgspec import Raw

from agents.protocol import VERSION
from agents.recording.database import Database, OpenFile, check_files, put_back, torn
from agents.recording.format import (
    ROW_COLUMNS,
    SCHEMA,
    SEGMENT_COLUMNS,
    Batch,
    RecordingError,
    check_columns,
    column_checksum,
    pack_row,
    row_of,
    thin,
    unpack_row,
)

BUSY_S = 10.0  # maximum wait for another process that uses the file, such as a backup
WAL_BYTES = 16 << 20  # size to which the write-ahead log is truncated when it is not in use

INSERT_ROW = f"INSERT INTO feed ({ROW_COLUMNS}, checksum, data) VALUES (?, ?, ?, ?, ?, ?, ?)"
INSERT_SEGMENT = (
    f"INSERT INTO segments ({SEGMENT_COLUMNS}, checksum, snapshot) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
CURVE = frozenset({"summary", "recalled"})  # kinds of updates that contain the curve
SIZES = (
    "SELECT id, thinned, LENGTH(snapshot) + "
    "(SELECT COALESCE(SUM(LENGTH(data)), 0) FROM feed WHERE segment = segments.id) FROM segments ORDER BY id"
)


class RecordingWriteError(Exception):
    """The recording cannot be written. The message is one sentence."""


class RecordingWriter:
    """Adds segments and rows, in chronological order; `commit` writes them in one transaction."""

    def __init__(self, path: Path, full_bytes: int, thin_bytes: int) -> None:
        self._path = path
        self._limits = (full_bytes, thin_bytes)
        self._added: list[tuple[str, tuple[object, ...]]] = []
        with self._sentence():
            db = self._connect()
            self.lost = torn(db, path)  # a sentence about data that the earlier recording has lost
            db.executescript(SCHEMA)
            for table in ("segments", "feed"):  # a recording of an earlier release has no checksums
                if "checksum" not in {row[1] for row in db.execute(f"PRAGMA table_info({table})")}:
                    db.execute(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER")
            found = db.execute(SIZES).fetchall()
            # Size of each segment in bytes, oldest segment first.
            self._full: dict[int, int] = {id: size for id, thinned, size in found if not thinned}
            self._thin: dict[int, int] = {id: size for id, thinned, size in found if thinned}
            self._file = OpenFile(path)
        self._segment = max((*self._full, *self._thin), default=0)

    def _connect(self) -> sqlite3.Connection:
        check_files(self._path, written=True)
        db = self._db = sqlite3.connect(self._path, isolation_level=None, timeout=BUSY_S, factory=Database)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
        return db

    def put_back(self) -> bool:
        """Restore the recording's file if it was removed; returns True if it was restored. Raises RecordingWriteError
        if the file cannot be restored.
        """
        if not self._file.removed:
            return False
        try:
            put_back(self._db, self._path)
            # The query also opens the write-ahead log.
            self._connect().execute("SELECT id FROM segments LIMIT 1").fetchall()
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
        columns = self._segment, VERSION, epoch, seq, float(time_s), step, int(follows), 0
        self._added.append((INSERT_SEGMENT, (*columns, column_checksum(columns), snapshot)))

    def add(self, batches: list[Batch], step: int | None) -> None:
        """Add a row to the newest segment; do nothing if `batches` is empty."""
        if batches:
            row = row_of(self._segment, batches, step)
            self._full[self._segment] += len(row[-1])
            self._added.append((INSERT_ROW, row))

    def commit(self) -> None:
        """Write the added segments and rows. If RecordingWriteError is raised, nothing was written to disk, and the
        added segments and rows are discarded.
        """
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
        """Thin the oldest full segment if the full segments exceed their size limit, and delete the oldest thinned
        segment if the thinned segments exceed theirs.

        Each call thins at most one segment and deletes at most one, so that new updates can be written between calls.
        The newest segment is neither thinned nor deleted.
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
        """Replace a segment with its thinned form. Raises RecordingError if the segment cannot be read."""
        with self._sentence():
            rows = self._db.execute(
                f"SELECT id, {ROW_COLUMNS}, checksum, data FROM feed WHERE segment = ? ORDER BY id",
                (segment,),
            ).fetchall()
            *columns, checksum, snapshot = self._db.execute(
                f"SELECT {SEGMENT_COLUMNS}, checksum, snapshot FROM segments WHERE id = ?", (segment,)
            ).fetchone()
            check_columns(columns, checksum)
            for _, *columns_of_row, checksum, _ in rows:
                check_columns(columns_of_row, checksum)
            *kept_columns, follows, _ = columns
            # If the segment continues the previous one, the earlier segments have the curve up to its start.
            snapshot = pack_row(thin(unpack_row(snapshot), CURVE if follows else frozenset()))
            kept = [batch for *_, data in rows for batch in thin(unpack_row(data))]
        size = len(snapshot)
        statements: list[tuple[str, tuple[object, ...]]] = [
            (
                "UPDATE segments SET thinned = 1, checksum = ?, snapshot = ? WHERE id = ?",
                (column_checksum((*kept_columns, follows, 1)), snapshot, segment),
            ),
            ("DELETE FROM feed WHERE segment = ?", (segment,)),
        ]
        if kept:
            *_, step, _, _ = rows[-1]
            # All updates go into one row with the first row's id, so that ids remain in order of time.
            row = row_of(segment, kept, step)
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
