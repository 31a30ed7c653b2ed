"""Reads from the recorded updates what snapshots do not contain: the curve of a range of steps at full resolution, and
earlier records. A snapshot keeps only a few curve values for each bucket of old steps, and only the newest record of
each kind and rank.
"""

from collections.abc import Callable, Iterator
from typing import Final

from agents.protocol import Summary, Update
from agents.recording.reader import Recording
from agents.state.metric_curves import Curve

ROWS: Final = """
SELECT id, segment FROM (
    SELECT id, segment, step, LAG(step) OVER (ORDER BY id) AS before FROM feed
) WHERE step < before OR (step >= ? AND COALESCE(before, 0) <= ?) ORDER BY id
"""
"""Rows that may have summaries of a range of steps, and rows in which the run returned to an earlier step."""

TOGETHER: Final = 4096
"""Number of summaries added to the curve at a time. In a long range this takes 20 us per step; adding them one by one
takes 300 us per step.
"""


def curve_between(
    recording: Recording,
    first: int,
    last: int,
    epoch: str,
    seq: int,
    cancelled: Callable[[], bool] = lambda: False,
) -> Curve | None:
    """The curve of the steps `first` to `last`, as it was after update `seq` of the hub process with the id `epoch`.
    `cancelled` is called for each row; if it returns true, the result is None.
    """
    recording.check_rows()
    curve = Curve()
    waiting: list[Summary] = []  # summaries of increasing steps, not yet in `curve`
    segments = {one.id: one for one in recording.segments()}
    newest = max((one.id for one in segments.values() if one.epoch == epoch), default=0)
    for id, segment in recording.rows(tuple[int, int], ROWS, first, last):
        if cancelled():
            return None
        if segment > newest or segment not in segments:
            continue
        for moment in recording.summaries(segments[segment], id):
            if moment.epoch == epoch and moment.seq > seq:
                curve.extend(waiting)
                return curve
            summary = moment.update
            assert isinstance(summary, Summary)
            before = waiting[-1].step if waiting else curve.last
            if before is not None and summary.step <= before:
                curve.extend(waiting)
                waiting.clear()
                curve.cut(summary.step)  # the run resumed from an earlier checkpoint
            if first <= summary.step <= last:
                waiting.append(summary)
        if len(waiting) >= TOGETHER:
            curve.extend(waiting)
            waiting.clear()
    curve.extend(waiting)
    return curve


BACKWARD: Final = "SELECT id, segment, step, LENGTH(data) FROM feed WHERE segment <= ? ORDER BY id DESC"


def records_before(
    recording: Recording,
    kinds: frozenset[str],
    epoch: str,
    seq: int,
    after: int,
    most_bytes: int,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Update]:
    """The updates of the given kinds up to update `seq` of the hub process `epoch`, oldest first. They go back to about
    step number `after`, or less far if the compressed rows would exceed `most_bytes`. `cancelled` is called for each
    row; if it returns true, no more updates follow.
    """
    segments = {one.id: one for one in recording.segments()}
    newest = max((one.id for one in segments.values() if one.epoch == epoch and one.seq <= seq), default=0)
    rows: list[tuple[int, int]] = []
    for id, segment, step, size in recording.rows(tuple[int, int, int | None, int], BACKWARD, newest):
        most_bytes -= size
        if most_bytes < 0 or (step is not None and step < after):
            break
        if segment in segments:
            rows.append((id, segment))
    for id, segment in reversed(rows):
        if cancelled():
            return
        for moment in recording.of_kinds(segments[segment], id, kinds):
            if moment.epoch == epoch and moment.seq > seq:
                return
            if moment.update:
                yield moment.update
