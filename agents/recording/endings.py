"""Reads the state of the run at the end of each earlier hub process, for a hub that starts in the same folder.

The file is untrusted input, so reading is limited in bytes and in time.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from agents.protocol import VERSION, Event, Hello, Recalled, Summary
from agents.recording.format import RecordingError, checked_kind, unpack, updates_of
from agents.recording.tables import Segment, Tables
from agents.state.metric_curves import Curve
from agents.state.run_state import RunState

STARTS = 64  # maximum number of hub processes whose history is read, newest first
# Maximum number of hub processes with a leader; more than one, because the newest may have been killed early.
LED_STARTS = 4
MOST_S = 5.0
ROW_BYTES = 64 << 20  # maximum size of a row, uncompressed, in bytes
KEPT_BYTES = 16 << 20  # maximum size of all updates that are read, packed, in bytes
STEPS_OF_SQLITE = 10_000  # virtual machine steps of SQLite between two checks of the time limit

LAST_SEGMENTS: Final = (
    "SELECT MAX(id) FROM segments NOT INDEXED WHERE epoch != ? GROUP BY epoch ORDER BY MAX(id) DESC LIMIT ?"
)
# The kinds of updates that are read.
KINDS: Final = frozenset(str(kind.__struct_config__.tag) for kind in (Summary, Event, Recalled, Hello))


@dataclass(frozen=True)
class Ending:
    """The leader of a run and the run's history (oldest data first) at the time when one of its hub processes ended.
    `curve` covers the steps before those of `summaries`.
    """

    leader: Hello
    summaries: list[Summary]
    events: list[Event]
    curve: Curve = field(default_factory=Curve)


def endings(path: Path, epoch: str, stopping: threading.Event) -> Iterator[Ending]:
    """The final states of all hub processes in the recording, newest first, except the current one, whose id is
    `epoch`. A process is skipped if its last segment contains no hello message of the leader rank, or was written with
    another protocol version.

    Raises RecordingError if the remaining states cannot be read, NothingRecordedError if nothing is recorded.
    """
    with contextlib.closing(_Endings(path, stopping)) as recording:
        yield from recording.before(epoch)


class _Endings(Tables):
    """Reads a recording, with limits on the number of bytes and on the time."""

    def __init__(self, path: Path, stopping: threading.Event) -> None:
        super().__init__(path)
        self._stopping = stopping
        self._until_s = time.monotonic() + MOST_S
        self._kept = 0
        self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, ROW_BYTES)
        self._db.set_progress_handler(self._is_over, STEPS_OF_SQLITE)

    def before(self, epoch: str) -> Iterator[Ending]:
        self.rows(tuple[()], "BEGIN")  # to read a consistent state of the file while the recorder writes
        led = 0
        with self._no_damage():
            self.note_lost_segments()
        for (id,) in self.rows(tuple[int], LAST_SEGMENTS, epoch, STARTS):
            segment = self.segment(id)
            ending = self._ending(segment) if segment.wire == VERSION else None
            if ending:
                led += 1
                yield ending
            if led == LED_STARTS:
                return

    @contextlib.contextmanager
    def _no_damage(self) -> Iterator[None]:
        """Context manager that raises RecordingError at its end if damage was found in the `with` block. Damage found
        earlier, such as a torn write-ahead log, is ignored.
        """
        known = len(self.damage)
        yield
        for damage in self.damage[known:]:
            raise RecordingError(damage)

    def _ending(self, segment: Segment) -> Ending | None:
        state, leader = RunState(), None
        for packed in self._updates(segment):
            self._check(len(memoryview(packed)))
            update = unpack(packed)
            if not isinstance(update, Hello):
                state.apply(update)
            elif update.leader:
                leader = update
        return Ending(leader, state.summaries, list(state.events), state.curve) if leader else None

    def _updates(self, segment: Segment) -> Iterator[msgspec.Raw]:
        """The segment's updates with a kind in `KINDS`, in order."""
        for data in self._blobs(segment):
            for packed in updates_of(data, ROW_BYTES):
                if checked_kind(packed) in KINDS:
                    yield packed

    def _blobs(self, segment: Segment) -> Iterator[bytes]:
        self._check()
        yield self.snapshot_of(segment)
        with self._no_damage():
            ids = self.row_ids(segment)
        for id in ids:
            self._check()
            if row := self.row(segment, id):
                yield row.data

    def _check(self, size: int = 0) -> None:
        self._kept += size
        if self._kept > KEPT_BYTES:
            raise RecordingError(f"{self.path} holds more than {KEPT_BYTES >> 20} MiB of history")
        if self._is_over():
            raise RecordingError(f"{self.path} takes more than {MOST_S:g} s to read")

    def _is_over(self) -> bool:
        return self._stopping.is_set() or time.monotonic() > self._until_s
