"""Reads the full curve of a range of steps from the recorded updates. (Snapshots have old steps only in buckets.)"""

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


def curve_between(recording: Recording, first: int, last: int, epoch: str, seq: int) -> Curve:
    """The curve of the steps `first` to `last`, as it was after update `seq` of the hub start `epoch`."""
    recording.check_rows()
    curve = Curve()
    segments = {one.id: one for one in recording.segments()}
    newest = max((one.id for one in segments.values() if one.epoch == epoch), default=0)
    for id, segment in recording.rows(tuple[int, int], ROWS, first, last):
        if segment > newest or segment not in segments:
            continue
        for moment in recording.summaries(segments[segment], id):
            if moment.epoch == epoch and moment.seq > seq:
                return curve
            summary = moment.update
            assert isinstance(summary, Summary)
            if curve.last is not None and summary.step <= curve.last:
                curve.cut(summary.step)  # the run resumed from an earlier checkpoint
            if first <= summary.step <= last:
                curve.extend([summary])
    return curve
