"""How the run stood when the hub starts in a recording ended: for a hub that is started on the same folder.

What lies on a disk is anybody's until it is checked. So what is read is bounded in bytes and in time, and a recording
that cannot be read costs what it holds.
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
from agents.recording.format import RecordingError, kind_of, unpack, updates_of
from agents.recording.reader import Recording
from agents.state.curve import Curve
from agents.state.run_state import RunState

STARTS = 64  # hub starts looked at, the newest,
TOLD = 4  # until so many of them knew a leader: a hub may be killed before it has heard of what its predecessor knew
MOST_S = 5.0
ROW_BYTES = 64 << 20  # of a row, uncompressed
KEPT_BYTES = 16 << 20  # of all that is looked at, packed
STEPS_OF_SQLITE = 10_000  # between two looks at the clock

LAST_SEGMENTS: Final = (
    "SELECT MAX(id) FROM segments WHERE epoch != ? AND wire = ? GROUP BY epoch ORDER BY MAX(id) DESC LIMIT ?"
)
KINDS: Final = frozenset(
    str(kind.__struct_config__.tag) for kind in (Summary, Event, Recalled, Hello)
)  # looked at


@dataclass(frozen=True)
class Ending:
    """What the hub knew of the run led by `leader`, oldest first; `curve` is of the steps before `summaries`."""

    leader: Hello
    summaries: list[Summary]
    events: list[Event]
    curve: Curve = field(default_factory=Curve)


def endings(path: Path, epoch: str, stopping: threading.Event) -> Iterator[Ending]:
    """The ends of the hub starts before `epoch`, newest first, of those that knew a leader; a few.

    RecordingError: no more of them can be read, in one sentence; `NothingRecordedError`: there are none.
    """
    with contextlib.closing(_Endings(path, stopping)) as recording:
        yield from recording.before(epoch)


class _Endings(Recording):
    """A recording that is read within bounds."""

    def __init__(self, path: Path, stopping: threading.Event) -> None:
        super().__init__(path)
        self._stopping = stopping
        self._until_s = time.monotonic() + MOST_S
        self._kept = 0
        self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, ROW_BYTES)
        self._db.set_progress_handler(self._is_over, STEPS_OF_SQLITE)

    def before(self, epoch: str) -> Iterator[Ending]:
        self.rows(tuple[()], "BEGIN")  # one state of the file, though the recorder goes on writing
        told = 0
        for (segment,) in self.rows(tuple[int], LAST_SEGMENTS, epoch, VERSION, STARTS):
            ending = self._ending(segment)
            if ending:
                told += 1
                yield ending
            if told == TOLD:
                return

    def _ending(self, segment: int) -> Ending | None:
        state, leader = RunState(), None
        for packed in self._updates(segment):
            self._check(len(memoryview(packed)))
            update = unpack(packed)
            if not isinstance(update, Hello):
                state.apply(update)
            elif update.leader:
                leader = update
        return Ending(leader, state.summaries, list(state.events), state.curve) if leader else None

    def _updates(self, segment: int) -> Iterator[msgspec.Raw]:
        """Those of a segment that count, in order."""
        rows = self.rows(tuple[int], "SELECT id FROM feed WHERE segment = ? ORDER BY id", segment)
        blobs = [("SELECT snapshot FROM segments WHERE id = ?", segment)]
        blobs += [("SELECT data FROM feed WHERE id = ?", id) for (id,) in rows]
        for query, id in blobs:
            self._check()
            for (data,) in self.rows(tuple[bytes], query, id):
                for packed in updates_of(data, ROW_BYTES):
                    if _kind(packed) in KINDS:
                        yield packed

    def _check(self, size: int = 0) -> None:
        self._kept += size
        if self._kept > KEPT_BYTES:
            raise RecordingError(f"{self.path} holds more of it than {KEPT_BYTES >> 20} MiB")
        if self._is_over():
            raise RecordingError(f"{self.path} takes more than {MOST_S:g} s to read")

    def _is_over(self) -> bool:
        return self._stopping.is_set() or time.monotonic() > self._until_s


def _kind(packed: msgspec.Raw) -> str:
    try:
        return kind_of(packed)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordingError(f"an update of the recording cannot be read: {error}") from None
