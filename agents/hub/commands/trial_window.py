"""Collects the step times that a trial compares: those of consecutive steps that ran with the same knob values."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from agents.protocol import MOST_TRIAL_STEPS, Changes, Summary

# Steps after a switch that are not measured: plans are rebuilt, memory is allocated, caches are cold.
SKIPPED_STEPS = 2
# After this many gaps in a series, the loop does not number its steps evenly, so a gap no longer restarts the series.
MOST_GAPS = 3


class Measured(NamedTuple):
    """The measurements of one step that a trial uses."""

    step: int
    step_ms: float
    loss: float | None


class Window:
    """Collects step times from the step summaries as they arrive, because the hub's run state keeps only the newest
    summaries."""

    def __init__(self) -> None:
        self._values: Changes | None = None
        self._steps: deque[Measured] = deque(maxlen=MOST_TRIAL_STEPS + SKIPPED_STEPS)
        self._stride = 0  # distance between neighbouring steps; 0: not known yet
        self._gaps = 0  # number of gaps since the window began
        self._oldest = 0  # the oldest known step when the window began
        self._last: Summary | None = None

    def follow(self, summaries: Sequence[Summary], values: Changes) -> list[Measured]:
        """The newest consecutive steps that ran with `values`, without the first steps after the switch to these
        values."""
        new = self._new(summaries)
        if values != self._values or new is None:
            self._values, self._last, self._stride, new = dict(values), None, 0, summaries
            self._steps.clear()
            self._gaps = 0
            self._oldest = summaries[0].step if summaries else 0
        for summary in new:
            self._take(summary)
        return list(islice(self._steps, SKIPPED_STEPS, None))

    def _new(self, summaries: Sequence[Summary]) -> Sequence[Summary] | None:
        """The step summaries that are new since the last call. None if the steps must be collected again from the
        start, because older summaries have been added or steps have been repeated.
        """
        if self._last is None or not summaries or summaries[0].step < self._oldest:
            return None
        place = bisect_right(summaries, self._last.step, key=lambda one: one.step)
        return summaries[place:] if place and summaries[place - 1] is self._last else None

    def _take(self, summary: Summary) -> None:
        apart = summary.step - self._last.step if self._last else 0
        if apart and apart != self._stride:
            # Some loops report only every tenth step, so the smallest distance is the stride; a larger distance is a
            # gap.
            if self._stride:
                self._gaps += 1
                if self._gaps <= MOST_GAPS:
                    self._steps.clear()
            self._stride = min(apart, self._stride or apart)
        self._last = summary
        if any(summary.knobs.get(name) != value for name, value in (self._values or {}).items()):
            self._steps.clear()
        else:
            self._steps.append(Measured(summary.step, summary.step_ms, summary.loss))
