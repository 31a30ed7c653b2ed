"""Reads only the end of a recording, for a list of many runs: a few bounded reads, however long the recording is.
Damage is detected only if it prevents reading; `agents.recording.reader` also detects other damage.
"""

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agents.protocol import Alert, Gone, Hello, Summary, Update
from agents.recording.database import open_unchecked
from agents.recording.format import RecordingError, Seconds, checked_kind, unpack, updates_of
from agents.recording.tables import Tables

MOST_S: Final = 0.5  # maximum time in SQLite for one recording
ROWS: Final = 8  # maximum number of rows that are read, newest first
ROW_BYTES: Final = 1 << 20  # maximum size of a row that is read, compressed
SNAPSHOT_BYTES: Final = 8 << 20
UNPACKED_BYTES: Final = 128 << 20
STEPS_OF_SQLITE: Final = 10_000  # virtual machine steps between two checks of the time limit

NEWEST_ROWS: Final = "SELECT id, LENGTH(data), time_s, step FROM feed NOT INDEXED ORDER BY id DESC LIMIT ?"
FIRST_ROWS: Final = "SELECT id, LENGTH(data) FROM feed WHERE segment = ? ORDER BY id LIMIT ?"
FIRST: Final = "SELECT time_s FROM segments NOT INDEXED ORDER BY id LIMIT 1"
NEWEST: Final = "SELECT id, LENGTH(snapshot), time_s, step FROM segments NOT INDEXED ORDER BY id DESC LIMIT 1"

_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in (Summary, Gone, Alert, Hello))
_HELLO = str(Hello.__struct_config__.tag)


@dataclass(frozen=True)
class Glance:
    """What the end of a recording tells about the run: its last step and loss, and whether it ended or failed. Times
    are Unix times from the hub's clock."""

    first_s: float
    last_s: float
    step: int | None = None  # the newest step with a summary
    loss: float | None = None  # loss of the newest summary, if that is near the end
    hello: Hello | None = None  # hello of the leader rank, if the newest snapshot or the last rows have one
    ended: bool = False  # whether the last rows contain the end of the leader rank
    failure: str = ""  # why the run failed, if the last rows contain that alert


def glance(path: Path) -> Glance:
    """Read only the end of a recording: its last step and loss, and whether the run ended. Raises RecordingError if the
    recording does not exist or cannot be read."""
    with contextlib.closing(_Glance(path)) as recording:
        return recording.read()


class _Glance(Tables):
    def __init__(self, path: Path) -> None:
        super().__init__(path, open_unchecked)
        until_s = time.monotonic() + MOST_S
        self._db.set_progress_handler(lambda: time.monotonic() > until_s, STEPS_OF_SQLITE)
        self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, SNAPSHOT_BYTES)

    def read(self) -> Glance:
        rows = self.rows(tuple[int, int, Seconds, int | None], NEWEST_ROWS, ROWS)
        segments = self.rows(tuple[int, int, Seconds, int | None], NEWEST)
        if not segments:
            raise RecordingError(f"{self.path} contains no state of the run")
        segment, size, time_s, step = segments[0]
        first_s = self.rows(tuple[Seconds], FIRST)[0][0]
        if rows:
            time_s, step = max(time_s, rows[0][2]), rows[0][3]
        hello, summary, failure = self._leader(segment, size), None, ""
        ended: bool | None = None  # None: neither the start nor the end of the leader has been read
        for update in self._newest(rows):
            match update:
                case Summary():
                    summary = summary or update
                case Hello(leader=True):
                    hello, ended = update, ended or False
                case Gone() if ended is None and update.rank == (hello.rank if hello else 0):
                    ended = update.over
                case Alert(name="failed", active=True):
                    failure = failure or update.text
        if summary:
            step = summary.step
        loss = summary.loss if summary else None
        return Glance(first_s, max(first_s, time_s), step, loss, hello, bool(ended), failure)

    def _newest(self, rows: list[tuple[int, int, float, int | None]]) -> Iterator[Update]:
        """The updates whose kind is in `_KINDS`, newest first, from the newest rows; stops after the first row that
        contains a summary."""
        for id, size, *_ in rows:
            if size > ROW_BYTES:
                continue
            ((data,),) = self.rows(tuple[bytes], "SELECT data FROM feed WHERE id = ?", id)
            found = [
                unpack(packed)
                for packed in updates_of(data, UNPACKED_BYTES)
                if checked_kind(packed) in _KINDS
            ]
            yield from reversed(found)
            if any(isinstance(update, Summary) for update in found):
                return

    def _leader(self, segment: int, size: int) -> Hello | None:
        """The hello of the leader or, if there is none, of any rank. The hello is read from the newest snapshot. If
        this snapshot has no hello, as at the start of a recording, the hello is read from the first rows of the
        segment.
        """
        any_rank = None
        for hello in self._hellos(segment, size):
            if hello.leader:
                return hello
            any_rank = any_rank or hello
        return any_rank

    def _hellos(self, segment: int, size: int) -> Iterator[Hello]:
        found = False
        if size <= SNAPSHOT_BYTES:
            for hello in self._hellos_in("SELECT snapshot FROM segments WHERE id = ?", segment):
                found = True
                yield hello
        if found:
            return
        for id, length in self.rows(tuple[int, int], FIRST_ROWS, segment, ROWS):
            if length <= ROW_BYTES:
                yield from self._hellos_in("SELECT data FROM feed WHERE id = ?", id)

    def _hellos_in(self, query: str, id: int) -> Iterator[Hello]:
        ((data,),) = self.rows(tuple[bytes], query, id)
        for packed in updates_of(data, UNPACKED_BYTES):
            if checked_kind(packed) == _HELLO and isinstance(update := unpack(packed), Hello):
                yield update
