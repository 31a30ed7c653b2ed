"""Reads the tables of a recording and detects damage that SQLite does not report.

SQLite has no checksums, so each row stores a checksum of its columns, and zlib stores a checksum in each blob. A
flipped bit in a page can also make whole rows unreadable. A damaged page belongs either to a table or to the table's
index, never to both, so the reader finds lost rows by comparing the two.
"""

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from agents.protocol import VERSION, clip
from agents.protocol.codec import recorded_version_refusal
from agents.recording.database import open_to_read
from agents.recording.format import (
    ROW_COLUMNS,
    SEGMENT_COLUMNS,
    NothingRecordedError,
    RecordingError,
    Seconds,
    check_columns,
)

TABLES: Final = "SELECT name FROM sqlite_master WHERE type = 'table'"
WITH_CHECKSUM: Final = "SELECT name FROM pragma_table_info('feed') WHERE name = 'checksum'"
LOST_SEGMENTS: Final = (
    "SELECT id FROM segments INDEXED BY segments_by_epoch EXCEPT SELECT id FROM segments NOT INDEXED"
)
IDS_BY_INDEX: Final = "SELECT id FROM feed INDEXED BY feed_by_segment WHERE segment = ? ORDER BY id"
IDS_IN_TABLE: Final = "SELECT id FROM feed NOT INDEXED WHERE segment = ? AND id >= ? AND id < ? ORDER BY id"
LAST_ID: Final = "SELECT COALESCE(MAX(id), 0) FROM feed NOT INDEXED"
SEGMENT_FROM: Final = "SELECT segment FROM feed NOT INDEXED WHERE id >= ? ORDER BY id LIMIT 1"
MOST_NOTES: Final = 32

SegmentRow = tuple[int, int, str, int, Seconds, int | None, int, int]
Opener = Callable[[Path], tuple[sqlite3.Connection, str]]
RowColumns = tuple[int, int, int, Seconds, int | None]


@dataclass(frozen=True)
class Segment:
    """A segment of a recording: a snapshot of the run's state and the updates that follow it. The snapshot is the state
    after update `seq`; `step` is the newest step with a summary in that state.
    """

    id: int
    wire: int
    epoch: str
    seq: int
    time_s: float
    step: int | None
    follows: int  # 1 if the segment continues the previous one without a gap
    thinned: int  # 1 if the per-rank records have been deleted


@dataclass(frozen=True)
class Row:
    """One row of `feed`: the packed updates with the numbers `first` to `last`. `time_s` is the time of the last
    update, and `step` is the newest step that has a summary."""

    segment: int
    first: int
    last: int
    time_s: float
    step: int | None
    data: bytes


class Tables:
    """The tables of a recording. Only one thread may use this object at a time. Methods raise RecordingError if the
    tables cannot be read."""

    def __init__(self, path: Path, opener: Opener = open_to_read) -> None:
        self.path = path
        if not path.exists():
            raise NothingRecordedError(f"there is no recording: {path} does not exist")
        self.damage: list[str] = []  # one sentence for each missing or unreadable part found so far
        self._all_checked = False
        self.rows_damaged = False  # set by `check_rows`
        try:
            self._db, lost = opener(path)
        except (sqlite3.Error, OSError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise RecordingError(f"{path} cannot be read: {' '.join(why.split())}") from None
        if lost:
            self.note(lost)
        try:
            self._check_content()
            self._checksum = "checksum" if self.rows(tuple[str], WITH_CHECKSUM) else "NULL"
        except RecordingError:
            self.close()
            raise

    def _check_content(self) -> None:
        """Raise RecordingError if the file is not a recording, is empty, or was written by an incompatible release."""
        tables = {name for (name,) in self.rows(tuple[str], TABLES)}
        if not tables & {"segments", "feed"}:
            what = "only commands; the run was not recorded" if tables else "nothing yet"
            raise NothingRecordedError(f"{self.path} holds {what}")
        wire = self.rows(tuple[int], "SELECT wire FROM segments ORDER BY id DESC LIMIT 1")
        if not wire and self.rows(tuple[int], "SELECT id FROM feed LIMIT 1"):
            raise RecordingError(f"{self.path} is damaged: its updates belong to no segment")
        if not wire:
            why = f"{self.path} is empty; the run has just begun, or was not recorded"
            raise NothingRecordedError(why)
        if wire[0][0] != VERSION:
            raise RecordingError(f"{self.path}: {recorded_version_refusal(wire[0][0])}")

    def note(self, damage: str) -> None:
        """Add a message about missing or unreadable data, such as a row, to `damage`, unless it is already there or
        `damage` has `MOST_NOTES` messages.
        """
        if damage not in self.damage and len(self.damage) < MOST_NOTES:
            self.damage.append(clip(damage))

    def rows(self, kind: Any, query: str, *values: object) -> list[Any]:
        """The rows of a query as tuples of type `kind`, validated because SQLite does not enforce column types."""
        return [self._converted(kind, row) for row in list(self._select(query, *values))]

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _select(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._db.execute(query, values)
        except sqlite3.Error as error:
            raise RecordingError(f"{self.path} cannot be read: {' '.join(str(error).split())}") from None

    def _converted(self, kind: Any, columns: Any) -> Any:
        try:
            return msgspec.convert(columns, kind)
        except msgspec.ValidationError as error:
            raise RecordingError(f"{self.path} cannot be read: {error}") from None

    # ------------------------------------------------------------------------------------------------ segments

    def segments(self) -> list[Segment]:
        """The readable segments, in chronological order. Raises RecordingError if no segment is readable."""
        found = []
        query = f"SELECT {SEGMENT_COLUMNS}, {self._checksum} FROM segments NOT INDEXED ORDER BY id"
        for columns in self.rows(tuple[Any, ...], query):
            try:
                found.append(self._segment_of(columns))
            except RecordingError as error:
                self.note(f"segment {columns[0]} cannot be read: {error}")
        self.note_lost_segments()
        if not found:
            raise RecordingError(f"{self.path} is damaged: none of its segments can be read")
        return found

    def segment(self, id: int) -> Segment:
        """The segment with this id. Raises RecordingError if the segment cannot be read."""
        query = f"SELECT {SEGMENT_COLUMNS}, {self._checksum} FROM segments WHERE id = ?"
        for columns in self.rows(tuple[Any, ...], query, id):
            return self._segment_of(columns)
        raise RecordingError(f"segment {id} is missing")

    def _segment_of(self, found: tuple[Any, ...]) -> Segment:
        *columns, checksum = found
        check_columns(columns, checksum)
        return Segment(*self._converted(SegmentRow, columns))

    def note_lost_segments(self) -> None:
        """Add a note to `damage` for each segment that is in the index but not in the table."""
        if self._checksum == "NULL":  # a recording of an earlier release has no such index
            return
        try:
            for (id,) in self.rows(tuple[int], LOST_SEGMENTS):
                self.note(f"segment {id} is missing")
        except RecordingError as error:
            self.note(f"a segment may be missing: {error}")

    def snapshot_of(self, segment: Segment) -> bytes:
        """The packed snapshot of a segment. Raises RecordingError if the snapshot cannot be read."""
        found = self.rows(tuple[bytes], "SELECT snapshot FROM segments WHERE id = ?", segment.id)
        if not found:
            raise RecordingError("it is not in the file")
        data: bytes = found[0][0]
        return data

    def is_whole(self, segment: Segment) -> bool:
        """Whether a segment still has all its rows. A live run may have thinned or deleted the segment after it was
        read."""
        return self.rows(tuple[int], "SELECT thinned FROM segments WHERE id = ?", segment.id) == [(0,)]

    # ---------------------------------------------------------------------------------------------------- rows

    def row_ids(self, segment: Segment) -> list[int]:
        """The ids of a segment's rows in chronological order, including rows that are only in the index or only in the
        table."""
        ids: set[int] = set()
        for read in (self._ids_by_index, self._ids_in_table):
            try:
                ids.update(read(segment.id))
            except RecordingError as error:
                self.note(f"not all updates from {segment.seq} of {segment.epoch} on can be read: {error}")
        return sorted(ids)

    def _ids_by_index(self, segment: int) -> list[int]:
        return [id for (id,) in self.rows(tuple[int], IDS_BY_INDEX, segment)]

    def _ids_in_table(self, segment: int) -> list[int]:
        """The ids of a segment's rows, read without the index. Bisection finds them, because the table stores rows in
        the order of their segments."""
        end = self.rows(tuple[int], LAST_ID)[0][0] + 1
        first, after = (self._first_id(number, end) for number in (segment, segment + 1))
        return [id for (id,) in self.rows(tuple[int], IDS_IN_TABLE, segment, first, after)]

    def _first_id(self, segment: int, end: int) -> int:
        """The lowest id among the rows of this segment and of later segments, found by bisection; `end` if there are no
        such rows."""
        low, high = 0, end
        while low < high:
            middle = (low + high) // 2
            found = self.rows(tuple[int], SEGMENT_FROM, middle)
            if not found or found[0][0] >= segment:
                high = middle
            else:
                low = middle + 1
        return low

    def row(self, segment: Segment, id: int) -> Row | None:
        """A row of a segment, or None if thinning has removed it. Raises RecordingError if the row is damaged or
        missing."""
        query = f"SELECT {ROW_COLUMNS}, {self._checksum}, data FROM feed WHERE id = ?"
        for *columns, checksum, data in self.rows(tuple[Any, ...], query, id):
            check_columns(columns, checksum)
            known: RowColumns = self._converted(RowColumns, columns)
            row = Row(*known, self._converted(bytes, data))
            if row.segment != segment.id:
                raise RecordingError(
                    f"the index of segment {segment.id} names a row of segment {row.segment}"
                )
            return row
        if self.is_whole(segment):
            raise RecordingError(f"row {id} is not in the file")
        return None

    def newest_row(self) -> RowColumns | None:
        """The columns of the newest row; None if no row exists or if the newest row cannot be read."""
        query = f"SELECT {ROW_COLUMNS}, {self._checksum} FROM feed NOT INDEXED ORDER BY id DESC LIMIT 1"
        for *columns, checksum in self.rows(tuple[Any, ...], query):
            try:
                check_columns(columns, checksum)
                newest: RowColumns = self._converted(RowColumns, columns)
            except RecordingError as error:
                self.note(f"the newest row cannot be read: {error}")
            else:
                return newest
        return None

    def check_rows(self) -> None:
        """Check all rows: their checksums, their order and their number. Call this method before you search the rows
        for a position in the recording. Only the first call checks the rows.
        """
        if self._all_checked:
            return
        self._all_checked = True
        count, before, left = 0, 0, 0
        query = (
            f"SELECT (SELECT COUNT(*) FROM feed INDEXED BY feed_by_segment), id, {ROW_COLUMNS}, {self._checksum} "
            "FROM feed NOT INDEXED ORDER BY id"
        )
        try:
            for indexed, id, *columns, checksum in self._select(query):
                check_columns(columns, checksum)
                if not isinstance(id, int) or id <= before:
                    raise RecordingError(f"row {id} follows row {before}")
                count, before = count + 1, id
                left = indexed - count
            if left:
                raise RecordingError(f"it has {count} rows, but its index has {count + left}")
        except RecordingError as error:
            self.rows_damaged = True
            self.note(f"the table of updates is damaged, so a position may be wrong: {error}")
