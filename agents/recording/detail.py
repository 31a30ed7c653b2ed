"""Reads the full curve of a range of steps from the recorded updates. (Snapshots have old steps only in buckets.)"""

from collections.abc import Callable
from typing import Final

from agents.protocol import Summary
from agents.recording.reader import Recording
from agents.state.metric_curve import Curve

ROWS: Final = """
SELECT id, segment FROM (
    SELECT id, segment, step, LAG(step) OVER (ORDER BY id) AS before FROM feed
) WHERE step < before OR (step >= ? AND COALESCE(before, 0) <= ?) ORDER BY id
"""
"""Rows that may have summaries of a range of steps, and rows in which the run returned to an earlier step."""

TOGETHER: Final = 4096
"""Summaries added to the curve at a time: 20 us a step, where one at a time takes 300 us in a long range."""


def curve_between(
    recording: Recording,
    first: int,
    last: int,
    epoch: str,
    seq: int,
    cancelled: Callable[[], bool] = lambda: False,
) -> Curve | None:
    """The curve of the steps `first` to `last`, as it was after update `seq` of the hub start `epoch`; None as soon as
    `cancelled` is true, which is asked at each row."""
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
