"""Replay: the state of a run at any position of its recording.

The state (`RunState`) is built from the same updates that the hub sent to its clients, so at each sequence number it
equals the state of a subscriber that missed no update.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import copy

from agents.protocol import Update
from agents.recording.format import RecordingError
from agents.recording.reader import Moment, Position, Recording
from agents.state.run_state import RunState


class Replay:
    """Rebuilds the state of a run from its recording, at a position that can move forward and back. `state` is the
    state at the current position: after update `seq` of the hub process `epoch`.

    `thinned`: whether the per-rank records at this position have been deleted. `resets` counts how often `state` was
    rebuilt.
    """

    def __init__(self, recording: Recording, lock: AbstractContextManager[object] | None = None) -> None:
        """`lock` is held while `state` changes, so that another thread that holds it can read `state`."""
        self.recording = recording
        self._lock = lock or contextlib.nullcontext()
        self.state = RunState()
        self.epoch = ""
        self.seq = 0
        self.time_s = 0.0
        self.thinned = False
        self.resets = 0
        self._moments: Iterator[Moment] = iter(())
        self._next: Moment | None = None
        self.seek(recording.at_start())

    @property
    def ended(self) -> bool:
        """Whether the replay has reached the end of the recording; anything recorded after the last `seek` is
        ignored."""
        return self._next is None

    @property
    def next_s(self) -> float | None:
        """The time of the next update or snapshot in the recording; None at the end."""
        return self._next.time_s if self._next else None

    def seek(self, place: Position) -> None:
        """Move to the position `place` of the recording, forward or back."""
        segments = self.recording.segments()
        start = next((one for one in segments if one.id >= place.segment), None)
        if start is None:
            raise RecordingError(f"{self.recording.path} no longer holds this position")
        if start.thinned:
            # The curve up to that position is in the earlier segments. These are thinned too, so reading them is fast.
            start = next(one for one in segments if one.epoch == start.epoch)
        for segment in reversed(segments[: segments.index(start) + 1]):
            self._moments = self.recording.moments(segment.id)
            self._next = next(self._moments, None)
            if self._next is None or self._next.snapshot is not None:
                break  # otherwise continue with the previous snapshot
        self.epoch = ""
        self.forward(place.beyond)

    def forward(self, beyond: Callable[[Moment], bool]) -> list[Update]:
        """Advance to the first `Moment` for which `beyond` is true, without applying it; returns the applied updates in
        order.

        If `resets` has increased, `state` was rebuilt from a snapshot, so the returned updates do not contain all
        changes.
        """
        applied: list[Update] = []
        while self._next is not None and not beyond(self._next):
            moment, self._next = self._next, next(self._moments, None)
            if moment.snapshot is not None:
                self._enter(moment, moment.snapshot)
            elif moment.epoch != self.epoch:
                self._enter(moment, ())
            elif moment.update is not None:
                with self._lock:
                    self.state.apply(moment.update)
                applied.append(moment.update)
            self.epoch, self.seq, self.time_s = moment.epoch, moment.seq, moment.time_s
        return applied

    def _enter(self, moment: Moment, snapshot: tuple[Update, ...]) -> None:
        state = RunState()
        for update in snapshot:
            state.apply(update)
        if moment.thinned and moment.epoch == self.epoch and not (state.curve or state.summaries):
            state.curve, state.summaries = copy(self.state.curve), list(self.state.summaries)
        self.state = state
        self.thinned = moment.thinned
        self.resets += 1
