"""Reads a recording: its segments, its updates, and positions by time, step or sequence number."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from agents.protocol import Summary, Update
from agents.recording.format import RecordingError, kind_of, unpack, unpack_row
from agents.recording.tables import Row, Segment, Tables
from agents.state.run_state import missing_steps

Newest = tuple[int | None]


class Moment(Struct, frozen=True):
    """One element of a recording: an `update`, or a `snapshot` at the start of a segment. If the snapshot of a segment
    cannot be read, `update` and `snapshot` are both None.
    """

    epoch: str
    seq: int
    time_s: float
    update: Update | None
    thinned: bool = False
    snapshot: tuple[Update, ...] | None = None


@dataclass(frozen=True)
class Position:
    """A position in a recording. To reach the position, read from segment `segment` on, and stop before the first
    `Moment` for which `beyond` is true.
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


class Recording(Tables):
    """The recording of a run that has ended or is live. Only one thread at a time may use this object. The constructor
    raises RecordingError if the recording cannot be read.
    """

    # ------------------------------------------------------------------------------------------------ contents

    def span(self) -> Span:
        """The range of steps and times recorded so far; this range grows while the run is live."""
        segments = self.segments()
        newest = segments[-1]
        row = self.newest_row()
        if row and row[0] == newest.id:
            _, _, seq, time_s, step = row
        else:
            seq, time_s, step = newest.seq, newest.time_s, newest.step
        return Span(segments[0].time_s, max(time_s, segments[0].time_s), newest.epoch, seq, step)

    def moments(self, segment: int = 0) -> Iterator[Moment]:
        """All readable snapshots and updates from segment `segment` on, in chronological order. A message for each
        unreadable snapshot or row, and for each gap, is added to `damage`."""
        before: tuple[str, int] | None = None  # epoch and sequence number up to which no update is missing
        for one in [one for one in self.segments() if one.id >= segment]:
            if one.follows and before and before != (one.epoch, one.seq):
                self._note_gap(one, before[1], one.seq + 1)
            snapshot: tuple[Update, ...] | None = None
            try:
                snapshot = tuple(self._snapshot(one))
            except RecordingError as error:
                self.note(f"the state at update {one.seq} of {one.epoch} cannot be read: {error}")
            self._note_dropped(snapshot or ())
            yield Moment(one.epoch, one.seq, one.time_s, None, bool(one.thinned), snapshot)
            seq = one.seq
            for id in self.row_ids(one):
                what, last = f"the updates of {one.epoch} in row {id}, after update {seq},", seq
                try:
                    row = self.row(one, id)
                    if row is None:
                        continue
                    what, last = f"the updates {row.first} to {row.last} of {one.epoch}", row.last
                    for moment in self._moments_of(one, row):
                        if moment.seq <= seq:
                            raise RecordingError("the updates are out of order")
                        if moment.seq > seq + 1 and not one.thinned:
                            self._note_gap(one, seq, moment.seq)
                        seq = moment.seq
                        self._note_dropped([moment.update] if moment.update else ())
                        yield moment
                except RecordingError as error:
                    self.note(f"{what} cannot be read: {error}")
                    seq = max(seq, last)
            before = None if one.thinned else (one.epoch, seq)

    def _note_dropped(self, updates: Iterable[Update]) -> None:
        """Note the steps that never reached the hub, which has reported each such gap as an event."""
        for text in missing_steps(updates):
            self.note(text)

    def _note_gap(self, segment: Segment, after: int, before: int) -> None:
        if self.is_whole(segment):
            self.note(f"the updates {after + 1} to {before - 1} of {segment.epoch} are missing")

    def _snapshot(self, segment: Segment) -> Iterator[Update]:
        for batch in unpack_row(self.snapshot_of(segment)):
            yield from map(unpack, batch.updates)

    def _moments_of(
        self, segment: Segment, row: Row | None, kinds: frozenset[str] | None = None
    ) -> Iterator[Moment]:
        for batch in unpack_row(row.data) if row else ():
            for seq, packed in enumerate(batch.updates, batch.first):
                if kinds is None or kind_of(packed) in kinds:
                    yield Moment(segment.epoch, seq, batch.time_s, unpack(packed), bool(segment.thinned))

    def summaries(self, segment: Segment, id: int) -> Iterator[Moment]:
        """The summaries in row `id`; other updates are not decoded."""
        return self.of_kinds(segment, id, frozenset({"summary"}))

    def of_kinds(self, segment: Segment, id: int, kinds: frozenset[str]) -> Iterator[Moment]:
        """The updates of the given kinds in row `id`; other updates are not decoded."""
        try:
            yield from self._moments_of(segment, self.row(segment, id), kinds)
        except RecordingError as error:
            self.note(f"the steps in row {id} cannot be read: {error}")

    # ----------------------------------------------------------------------------------------------- positions

    def at_end(self) -> Position:
        return Position(self.segments()[-1].id, lambda moment: False)

    def at_start(self) -> Position:
        first = self.segments()[0]
        return Position(first.id, lambda moment: moment.snapshot is None or moment.seq > first.seq)

    def at_time(self, time_s: float) -> Position:
        """The position at time `time_s` of the hub's clock, or the start of the recording if `time_s` is before the
        start."""
        segments = self.segments()
        before = [one for one in segments if one.time_s <= time_s] or segments[:1]
        return Position(before[-1].id, lambda moment: moment.time_s > max(time_s, segments[0].time_s))

    def at_seq(self, seq: int, epoch: str | None = None) -> Position:
        """The position after update `seq` of the hub process with the id `epoch` (default: the last hub process)."""
        self.check_rows()
        segments = self.segments()
        epoch = epoch or segments[-1].epoch
        mine = [one for one in segments if one.epoch == epoch]
        if not mine:
            known = ", ".join(dict.fromkeys(one.epoch for one in segments))
            raise RecordingError(
                f"{self.path} holds no update of the hub process {epoch}; it holds updates of {known}"
            )
        last = max(self._last_seq(mine), mine[-1].seq)
        if not mine[0].seq <= seq <= last:
            raise RecordingError(
                f"{self.path} holds the updates {mine[0].seq} to {last} of {epoch}, not {seq}"
            )
        start = [one for one in mine if one.seq <= seq][-1]
        return Position(start.id, lambda moment: moment.epoch != epoch or moment.seq > seq)

    def _last_seq(self, segments: list[Segment]) -> int:
        """The highest sequence number recorded from the hub process that wrote `segments`."""
        epoch = segments[0].epoch
        if self.rows_damaged:
            moments = (moment for moment in self.moments(segments[0].id) if moment.epoch == epoch)
            return max((moment.seq for moment in moments), default=0)
        query = "SELECT MAX(last) FROM feed WHERE segment IN (SELECT id FROM segments WHERE epoch = ?)"
        last: int | None = self.rows(Newest, query, epoch)[0][0]
        return last or 0

    def at_step(self, step: int) -> Position:
        """The position after the summary of step `step`; if the run repeated the step, the last such position."""
        self.check_rows()
        if self.rows_damaged:
            return self._read_step(step)
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
        start = self.rows(tuple[int], "SELECT segment FROM feed WHERE id > ? ORDER BY id LIMIT 1", row)
        if not start:
            raise RecordingError(f"{self.path} is damaged: there is no row after row {row}")

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

        return Position(start[0][0], beyond)

    def _read_step(self, step: int) -> Position:
        """Like `at_step`, but for a damaged table, which SQLite cannot search: scans all readable updates. If the
        summary of the step is lost, the position is just before the next summary.
        """
        starts = {(one.epoch, one.seq): one.id for one in self.segments()}
        segment = min(starts.values())
        exact: tuple[int, str, int] | None = None
        crossing: tuple[int, str, int] | None = None
        steps: set[int] = set()
        before = self.segments()[0].step
        before = -1 if before is None else before
        for moment in self.moments():
            if moment.update is None:
                segment = starts.get((moment.epoch, moment.seq), segment)
            if not isinstance(moment.update, Summary):
                continue
            here = segment, moment.epoch, moment.seq
            if moment.update.step == step:
                exact = here
            elif before < step < moment.update.step:
                crossing = here
            before = moment.update.step
            steps.add(before)
        found = exact or crossing
        if found is None:
            held = f"steps from {min(steps)} to {max(steps)}" if steps else "no step"
            raise RecordingError(f"of {self.path}, {held} can be read, not {step}")
        there = False

        def beyond(moment: Moment) -> bool:
            nonlocal there
            if there:
                return True
            there = moment.update is not None and (moment.epoch, moment.seq) == found[1:]
            return there and exact is None

        return Position(found[0], beyond)

    def _reached(self, row: int, step: int) -> int | None:
        """Of the summaries after row `row`, finds the first one for `step` or a later step, and returns its step; None
        if there is no such summary."""
        after = "SELECT id, segment FROM feed WHERE id > ? ORDER BY id"
        segments = {one.id: one for one in self.segments()}
        for id, segment in self.rows(tuple[int, int], after, row):
            with contextlib.suppress(RecordingError):  # `moments` reports the damage when it reads that row
                if segment not in segments:
                    continue
                one = segments[segment]
                for moment in self._moments_of(one, self.row(one, id)):
                    if isinstance(moment.update, Summary) and moment.update.step >= step:
                        return moment.update.step
        return None
