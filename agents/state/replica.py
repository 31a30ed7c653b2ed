"""A client's copy of a run's state, kept up to date from the frames that the hub sends."""

import contextlib
from contextlib import AbstractContextManager

from agents.protocol import Unknown, Update, Updates
from agents.state.run_state import RunState


class Replica:
    """`state` is the state of the run after update `seq` of the hub process `epoch`.

    After a gap in the sequence numbers, or a restart of the hub, the client needs a snapshot. `epoch` is empty until
    the snapshot arrives; a credit message (flow control) with an empty epoch requests a snapshot. `resets` counts how
    often `state` was rebuilt. If `behind` is set, `state` is older than the last frame, because the hub is still
    sending earlier changes.
    """

    def __init__(self, lock: AbstractContextManager[object] | None = None) -> None:
        """`lock` is held while `state` changes, so that another thread that holds `lock` can read `state`."""
        self.state = RunState()
        self.epoch = ""
        self.seq = 0
        self.resets = 0
        self.behind = False
        self._lock = lock or contextlib.nullcontext()
        self._snapshot: _PartialSnapshot | None = None

    @property
    def loading(self) -> tuple[int, int] | None:
        """While a snapshot is being received: how many of its frames have arrived, and how many it has in total. Else
        None.
        """
        partial = self._snapshot
        return (partial.frames - partial.missing, partial.frames) if partial else None

    def apply(self, frame: Updates, applied: list[Update]) -> bool:
        """Apply a frame and append its updates to `applied`; False if a snapshot is needed.

        When all frames of a snapshot have arrived, the list `applied` is cleared, because `state.replay()` then returns
        the updates that rebuild the new state.
        """
        done = (
            self._add_snapshot_frame(frame, applied) if frame.snapshot else self._apply_live(frame, applied)
        )
        if not done:
            self.epoch, self.seq, self._snapshot = "", 0, None
        return done

    def _apply_live(self, frame: Updates, applied: list[Update]) -> bool:
        # With `since`, the frame has the newest values of everything that changed after `since`. Otherwise its updates
        # have consecutive numbers.
        first = frame.seq - len(frame.updates) + 1 if frame.since is None else frame.since + 1
        if frame.epoch != self.epoch or first > self.seq + 1:
            return False  # the frame is from another hub process, or updates before it are missing
        known = self.seq + 1 - first if frame.since is None else 0  # updates received twice
        with self._lock:
            for update in frame.updates[known:]:
                self.state.apply(update)
        applied += (update for update in frame.updates[known:] if not isinstance(update, Unknown))
        self.seq = max(self.seq, frame.seq)
        if frame.updates:  # only the last frame of a batch of newest values advances the sequence number
            self.behind = frame.seq == frame.since
        return True

    def _add_snapshot_frame(self, frame: Updates, applied: list[Update]) -> bool:
        if frame.begins:
            self._snapshot = _PartialSnapshot(frame.epoch, frame.seq, frame.snapshot)
        snapshot = self._snapshot
        if snapshot is None or not snapshot.continues_with(frame):
            return False
        for update in frame.updates:
            snapshot.state.apply(update)
        snapshot.missing -= 1
        if snapshot.missing:
            return True
        self._snapshot = None
        self.state, self.epoch, self.seq = snapshot.state, snapshot.epoch, snapshot.seq
        self.resets += 1
        self.behind = False
        applied.clear()
        return True


class _PartialSnapshot:
    """A snapshot whose last frames have not arrived yet."""

    def __init__(self, epoch: str, seq: int, frames: int) -> None:
        self.epoch = epoch
        self.seq = seq
        self.frames = self.missing = frames
        # The state is built frame by frame, because all updates at once would take twice the memory.
        self.state = RunState()

    def continues_with(self, frame: Updates) -> bool:
        return (frame.epoch, frame.seq, frame.snapshot) == (self.epoch, self.seq, self.missing)
