"""Reads a recording: its segments, its updates, and positions by time, step or sequence number."""

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from agents.protocol import VERSION, Summary, Update, clip
from agents.protocol.codec import version_refusal
from agents.recording.database import open_to_read
from agents.recording.format import NothingRecordedError, RecordingError, kind_of, unpack, unpack_row

SegmentRow = tuple[int, int, str, int, float, int | None, int, int]
Newest = tuple[int | None]
SEGMENTS: Final = "SELECT id, wire, epoch, seq, time_s, step, thinned, follows FROM segments"
TABLES: Final = "SELECT name FROM sqlite_master WHERE type = 'table'"
MOST_NOTES: Final = 32


@dataclass(frozen=True)
class Segment:
    """One segment. Its snapshot is the state after update `seq`; `step` is the newest step with a summary in that
    state.
    """

    id: int
    wire: int
    epoch: str
    seq: int
    time_s: float
    step: int | None
    thinned: int  # 1 if the records of single ranks have been deleted
    follows: int  # 1 if the segment continues the previous one without a gap


class Moment(Struct, frozen=True):
    """One element of a recording: an `update`, or a `snapshot` at the start of a segment. It has neither if the
    snapshot of a segment cannot be read.
    """

    epoch: str
    seq: int
    time_s: float
    update: Update | None
    thinned: bool = False
    snapshot: tuple[Update, ...] | None = None


@dataclass(frozen=True)
class Position:
    """A position in a recording. To get there, read from segment `segment` on, and stop before the first moment for
    which `beyond` is true.
    """

    segment: int
    beyond: Callable[[Moment], bool]


CROSSINGS: Final = """
SELECT id, last, epoch FROM (
    SELECT feed.id, feed.last, segments.epoch, feed.step AS before, LEAD(feed.step) OVER (ORDER BY feed.id) AS step
    FROM feed JOIN segments ON segments.id = feed.segment
) WHERE step >= ? AND (before IS NULL OR before < ? OR before > step) ORDER BY id DESC
"""
"""Rows after which the run may have reached a step, last first."""


@dataclass(frozen=True)
class Span:
    """The first and last step and time of a recording; times are in seconds since the epoch."""

    first_s: float
    last_s: float
    last_epoch: str
    last_seq: int
    last_step: int | None


class Recording:
    """The recording of a run that has ended or is live. Only one thread may use it at a time. RecordingError: it cannot
    be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            raise NothingRecordedError(f"there is no recording: {path} does not exist")
        self.damage: list[str] = []  # one sentence for each missing or unreadable part found so far
        try:
            self._db, lost = open_to_read(path)
        except (sqlite3.Error, OSError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise RecordingError(f"{path} cannot be read: {' '.join(why.split())}") from None
        if lost:
            self.note(lost)
        try:
            tables = {name for (name,) in self.rows(tuple[str], TABLES)}
            if not tables & {"segments", "feed"}:
                what = "only commands; the run was not recorded" if tables else "nothing yet"
                raise NothingRecordedError(f"{path} holds {what}")
            wire = self.rows(tuple[int], "SELECT wire FROM segments ORDER BY id DESC LIMIT 1")
            if not wire and self.rows(tuple[int], "SELECT id FROM feed LIMIT 1"):
                raise RecordingError(f"{path} is damaged: its updates belong to no segment")
            if not wire:
                why = f"{path} is empty; the run has just begun, or was not recorded"
                raise NothingRecordedError(why)
            if wire[0][0] != VERSION:
                raise RecordingError(f"{path}: {version_refusal(wire[0][0])}")
        except RecordingError:
            self.close()
            raise

    def note(self, damage: str) -> None:
        """Add a sentence about an unreadable part to `damage`, unless it is already there or `damage` has `MOST_NOTES`
        sentences.
        """
        if damage not in self.damage and len(self.damage) < MOST_NOTES:
            self.damage.append(clip(damage))

    def rows(self, kind: Any, query: str, *values: object) -> list[Any]:
        """The rows as tuples of type `kind`; they are validated, because SQLite does not enforce column types."""
        try:
            return msgspec.convert(self._db.execute(query, values).fetchall(), list[kind])
        except (sqlite3.Error, msgspec.ValidationError) as error:
            why = " ".join(str(error).split())
            raise RecordingError(f"{self.path} cannot be read: {why}") from None

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    # ------------------------------------------------------------------------------------------------ contents

    def segments(self) -> list[Segment]:
        """All segments, in order of time."""
        return [Segment(*row) for row in self.rows(SegmentRow, f"{SEGMENTS} ORDER BY id")]

    def span(self) -> Span:
        """The range that is recorded so far; the recording of a live run grows."""
        segments = self.segments()
        newest = segments[-1]
        rows = self.rows(
            tuple[int, int, float, int | None],
            "SELECT segment, last, time_s, step FROM feed ORDER BY id DESC LIMIT 1",
        )
        if rows and rows[0][0] == newest.id:
            _, seq, time_s, step = rows[0]
        else:
            seq, time_s, step = newest.seq, newest.time_s, newest.step
        return Span(segments[0].time_s, max(time_s, segments[0].time_s), newest.epoch, seq, step)

    def moments(self, segment: int = 0) -> Iterator[Moment]:
        """All readable moments from segment `segment` on; unreadable parts are added to `damage`."""
        before: tuple[str, int] | None = None  # epoch and sequence number up to which no update is missing
        for one in [one for one in self.segments() if one.id >= segment]:
            if one.follows and before and before != (one.epoch, one.seq):
                self._note_gap(one, before[1], one.seq + 1)
            snapshot: tuple[Update, ...] | None = None
            try:
                snapshot = tuple(self._snapshot(one.id))
            except RecordingError as error:
                self.note(f"the state at update {one.seq} of {one.epoch} cannot be read: {error}")
            yield Moment(one.epoch, one.seq, one.time_s, None, bool(one.thinned), snapshot)
            seq = one.seq
            for id, first, last in self._rows_of(one):
                try:
                    for moment in self._row(one, id):
                        if moment.seq <= seq:
                            raise RecordingError("the updates are out of order")
                        if moment.seq > seq + 1 and not one.thinned:
                            self._note_gap(one, seq, moment.seq)
                        seq = moment.seq
                        yield moment
                except RecordingError as error:
                    self.note(f"the updates {first} to {last} of {one.epoch} cannot be read: {error}")
                    seq = max(seq, last)
            before = None if one.thinned else (one.epoch, seq)

    def _rows_of(self, segment: Segment) -> list[tuple[int, int, int]]:
        """For each row of a segment, its id and the numbers of its first and last update."""
        # The second query reads without the index, which may be damaged.
        for table in ("feed", "feed NOT INDEXED"):
            query = f"SELECT id, first, last FROM {table} WHERE segment = ? ORDER BY id"
            try:
                return self.rows(tuple[int, int, int], query, segment.id)
            except RecordingError as error:
                self.note(f"not all from update {segment.seq} of {segment.epoch} on can be read: {error}")
        return []

    def _note_gap(self, segment: Segment, after: int, before: int) -> None:
        now = self.rows(tuple[int], "SELECT thinned FROM segments WHERE id = ?", segment.id)
        if now == [(0,)]:  # not if the hub has thinned the segment during this read
            self.note(f"the updates {after + 1} to {before - 1} of {segment.epoch} are missing")

    def _snapshot(self, segment: int) -> Iterator[Update]:
        for (snapshot,) in self.rows(tuple[bytes], "SELECT snapshot FROM segments WHERE id = ?", segment):
            for batch in unpack_row(snapshot):
                yield from map(unpack, batch.updates)

    def _row(self, segment: Segment, id: int, kinds: frozenset[str] | None = None) -> Iterator[Moment]:
        # The hub may have thinned the segment and so deleted the row during this read; then nothing is yielded.
        data_of = "SELECT data FROM feed WHERE id = ? AND segment = ?"
        for (data,) in self.rows(tuple[bytes], data_of, id, segment.id):
            for batch in unpack_row(data):
                for seq, packed in enumerate(batch.updates, batch.first):
                    if kinds is None or kind_of(packed) in kinds:
                        yield Moment(segment.epoch, seq, batch.time_s, unpack(packed), bool(segment.thinned))

    def summaries(self, segment: Segment, id: int) -> Iterator[Moment]:
        """The summaries in a row, without decoding the other updates."""
        try:
            yield from self._row(segment, id, frozenset({"summary"}))
        except RecordingError as error:
            self.note(f"the steps in row {id} cannot be read: {error}")

    # ----------------------------------------------------------------------------------------------- positions

    def at_end(self) -> Position:
        return Position(self.segments()[-1].id, lambda moment: False)

    def at_start(self) -> Position:
        first = self.segments()[0]
        return Position(first.id, lambda moment: moment.snapshot is None or moment.seq > first.seq)

    def at_time(self, time_s: float) -> Position:
        """The position at time `time_s` of the hub's clock; the start of the recording if `time_s` is earlier."""
        segments = self.segments()
        before = [one for one in segments if one.time_s <= time_s] or segments[:1]
        return Position(before[-1].id, lambda moment: moment.time_s > max(time_s, segments[0].time_s))

    def at_seq(self, seq: int, epoch: str | None = None) -> Position:
        """The position after update `seq` of the hub start `epoch` (default: the last)."""
        segments = self.segments()
        epoch = epoch or segments[-1].epoch
        mine = [one for one in segments if one.epoch == epoch]
        if not mine:
            known = ", ".join(dict.fromkeys(one.epoch for one in segments))
            raise RecordingError(f"{self.path} holds no hub start {epoch}; there are {known}")
        rows = self.rows(
            Newest,
            "SELECT MAX(last) FROM feed WHERE segment IN (SELECT id FROM segments WHERE epoch = ?)",
            epoch,
        )
        last = max(rows[0][0] or 0, mine[-1].seq)
        if not mine[0].seq <= seq <= last:
            raise RecordingError(
                f"{self.path} holds the updates {mine[0].seq} to {last} of {epoch}, not {seq}"
            )
        start = [one for one in mine if one.seq <= seq][-1]
        return Position(start.id, lambda moment: moment.epoch != epoch or moment.seq > seq)

    def at_step(self, step: int) -> Position:
        """The position after the summary of step `step`; if the run repeated the step, the last such position."""
        rows = self.rows(tuple[int, int, str], CROSSINGS, step, step)
        newest, first = self.rows(Newest, "SELECT MAX(step) FROM feed")[0][0], self.segments()[0].step
        if newest is None or newest < step or (not rows and first is not None and first > step):
            held = "no step yet" if newest is None else f"the steps {first or 0} to {newest}"
            raise RecordingError(f"{self.path} holds {held}, not {step}")
        # A restarted hub knows no step at first, which does not mean that the run returned to an earlier step.
        crossings = [*rows, (0, -1, "")]
        row, last, epoch = next(
            (one for one in crossings if self._reached(one[0], step) == step), crossings[0]
        )
        start = self.rows(tuple[int], "SELECT segment FROM feed WHERE id > ? ORDER BY id LIMIT 1", row)[0][0]

        there = False

        def beyond(moment: Moment) -> bool:
            nonlocal there
            if there:
                return True
            summary = moment.update if isinstance(moment.update, Summary) else None
            if summary is None or (moment.epoch == epoch and moment.seq <= last):
                return False
            there = summary.step == step
            return summary.step > step

        return Position(start, beyond)

    def _reached(self, row: int, step: int) -> int | None:
        """The first step >= `step` with a summary after a row."""
        after = "SELECT id, segment FROM feed WHERE id > ? ORDER BY id"
        segments = {one.id: one for one in self.segments()}
        for id, segment in self.rows(tuple[int, int], after, row):
            with contextlib.suppress(RecordingError):  # `moments` reports the damage when it reads that row
                for moment in self._row(segments[segment], id) if segment in segments else ():
                    if isinstance(moment.update, Summary) and moment.update.step >= step:
                        return moment.update.step
        return None
