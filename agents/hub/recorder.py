"""The recorder: writes a run's updates to disk from its own thread.

The recorder reads the update log as a client does. `follow` passes new updates to the thread, which compresses and
writes them. If the thread falls behind, `follow` passes no updates until the thread's queue has room. If the update log
drops an update before it is passed to the thread, the recording has a gap and continues with a snapshot. A slow disk
never delays the hub's loop. If the disk is full or broken, the recording stops, an event is logged, and writing is
retried every `RETRY_S` seconds.
"""

import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import Raw

from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Event, Update, clip, codec
from agents.recording.format import Batch
from agents.recording.writer import RecordingWriteError, RecordingWriter

MIB = 1 << 20
DEFAULT_RECORD_MB = 512
RETRY_S = 30.0  # interval between attempts to write after a failure


@dataclass(frozen=True)
class Limits:
    """Size limits and time intervals of a recording. `full_bytes` and `thin_bytes` limit compressed sizes."""

    # Maximum size of the segments with all updates; above it, the oldest segment is thinned.
    full_bytes: int = DEFAULT_RECORD_MB * 10**6
    # Maximum size of the thinned segments; above it, the oldest segment is deleted.
    thin_bytes: int = DEFAULT_RECORD_MB * 10**6 // 4
    segment_bytes: int = 4 * MIB  # minimum size of the updates between two snapshots, uncompressed
    snapshot_multiple: int = 4  # the updates are also at least this many times as large as the snapshot
    queue_bytes: int = 16 * MIB  # maximum size of updates queued for the thread, uncompressed
    commit_s: float = 0.5  # time between two commits
    # First minimum interval between two gaps; doubles after each, up to `max_gap_interval_s`.
    gap_interval_s: float = 10.0
    max_gap_interval_s: float = 300.0

    @classmethod
    def of(cls, megabytes: int) -> "Limits | None":
        """Limits of a recording in which the segments that are not thinned, and so keep every update, take at most
        `megabytes` (10**6 bytes) in total; None if `megabytes` is not positive, because then nothing is recorded."""
        if megabytes <= 0:
            return None
        size = megabytes * 10**6
        # A small recording has smaller segments, so that there are several segments to thin.
        return cls(size, size // 4, min(cls.segment_bytes, max(size, MIB)))


@dataclass(frozen=True)
class _Begin:
    """An item of the thread's queue: begin a new segment of the recording with the state after update `seq`."""

    epoch: str
    seq: int
    time_s: float
    step: int | None
    follows: bool  # whether the segment continues the previous one without a gap
    state: list[Update]


@dataclass(frozen=True)
class _Follow:
    """An item of the thread's queue: write the next updates."""

    first: int
    time_s: float
    step: int | None
    packed: list[bytes]
    size: int


class Recorder:
    """Records the updates of `update_log`, from the first one on. The hub calls `follow` and `close`; a thread writes
    to disk."""

    def __init__(self, path: Path, update_log: UpdateLog, limits: Limits = Limits()) -> None:
        self._path = path
        self._update_log = update_log
        self._limits = limits
        self._queue: queue.SimpleQueue[_Begin | _Follow] = queue.SimpleQueue()
        self._seq = 0  # number of the last update passed to the thread
        self._queued_bytes = 0  # set only by the hub's loop
        self._written_bytes = 0  # set only by the thread
        self._segment_size = 0
        self._snapshot_bytes = 0  # size of the newest snapshot; set by the thread
        self._failure: str | None = None  # set by the thread; reset to None when a segment begins
        # Warnings from the thread, for the run's log.
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reported: str | None = None
        self._retry_s = 0.0
        self._lost = 0
        self._next_gap_s = 0.0  # earliest time at which to resume after a gap
        self._gap_interval_s = limits.gap_interval_s
        self._ending = threading.Event()
        self._begin()
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------------------- the loop

    def follow(self) -> None:
        """Pass new updates to the thread without waiting for it. Copies the whole state whenever a segment begins."""
        now = time.monotonic()
        while not self._warnings.empty():
            self._log("warning", self._warnings.get())
        if self._is_failing(now) or self._queued_bytes - self._written_bytes > self._limits.queue_bytes:
            return  # the updates remain in the log
        update_log = self._update_log
        if not update_log.holds(update_log.epoch, self._seq):
            self._resume_after_gap(now)
        elif update_log.seq > self._seq:
            packed = update_log.after(self._seq)
            size = sum(map(len, packed))
            self._queue.put(_Follow(self._seq + 1, time.time(), self._step, packed, size))
            self._seq = update_log.seq
            self._queued_bytes += size
            self._segment_size += size
            if self._segment_size >= self._segment_bytes:
                self._begin(follows=True)

    def _is_failing(self, now: float) -> bool:
        """Whether writing currently fails; logs each failure and each recovery once."""
        failure = self._failure
        if failure is None and not self._thread.is_alive():
            failure = "its thread has failed (see the hub's own log)"
        if failure and not self._reported:
            self._log("error", f"the recording stops: {failure}; telemetry continues")
            self._reported, self._retry_s = failure, now + RETRY_S
        elif failure and now >= self._retry_s:
            self._retry_s = now + RETRY_S
            self._begin()
        elif self._reported and not failure:
            self._reported = None
            self._log("info", "the recording continues after a gap")
            return False
        return failure is not None

    def _resume_after_gap(self, now: float) -> None:
        """Continue the recording with a snapshot as soon as the thread has caught up. Called when the update log no
        longer holds the next update to record."""
        if self._queued_bytes > self._written_bytes or now < self._next_gap_s:
            return
        lost = self._update_log.seq - self._seq
        self._gap_interval_s = min(2 * self._gap_interval_s, self._limits.max_gap_interval_s)
        self._next_gap_s = now + self._gap_interval_s
        self._begin()
        self._log(
            "warning",
            f"the recording has a gap because the disk was too slow: {lost} update{'s' * (lost != 1)} not recorded",
        )

    def _begin(self, follows: bool = False) -> None:
        """Begin a new segment of the recording with the run's current state. The state is passed to the thread as
        messages, which are immutable, so the thread can pack them while the hub continues."""
        update_log = self._update_log
        self._seq, self._segment_size = update_log.seq, 0
        state = list(update_log.newest.all())
        self._queue.put(_Begin(update_log.epoch, update_log.seq, time.time(), self._step, follows, state))

    @property
    def _segment_bytes(self) -> int:
        return max(self._limits.segment_bytes, self._limits.snapshot_multiple * self._snapshot_bytes)

    @property
    def _step(self) -> int | None:
        summaries = self._update_log.state.summaries
        return summaries[-1].step if summaries else None

    def _log(self, level: Literal["info", "warning", "error"], text: str) -> None:
        self._update_log.publish(Event(time.time(), level, "hub", clip(text)))

    def close(self, timeout_s: float = 2.0) -> None:
        """Pass the remaining updates to the thread, and wait up to `timeout_s` until it has written them and ended."""
        self.follow()
        self._ending.set()
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------------------------------ the thread

    def _work(self) -> None:
        writer: RecordingWriter | None = None
        opened = False  # whether this hub has opened the file before
        while True:
            ending = self._ending.wait(self._limits.commit_s)  # more updates arrive in the meantime
            items: list[_Begin | _Follow] = []
            while not self._queue.empty():
                items.append(self._queue.get())
            try:
                if items and writer is None:
                    writer = RecordingWriter(self._path, self._limits.full_bytes, self._limits.thin_bytes)
                    # Later, an incomplete transaction is the hub's own; its failure is already in the log.
                    if writer.lost and not opened:
                        self._warnings.put(
                            f"the recording from before this hub started is incomplete: {writer.lost}"
                        )
                    opened = True
                if writer is not None:
                    if writer.put_back():
                        self._warnings.put(
                            f"the recording {self._path} was removed; it is restored with its whole content"
                        )
                    self._write(writer, items)
            except Exception as error:  # noqa: BLE001 - any failure is logged and retried
                self._failure = (
                    str(error) if isinstance(error, RecordingWriteError) else f"internal error: {error!r}"
                )
                if writer is not None:
                    writer.close()
                    writer = None
            self._written_bytes += sum(item.size for item in items if isinstance(item, _Follow))
            if ending:
                if writer is not None:
                    writer.close()
                return

    def _write(self, writer: RecordingWriter, items: list[_Begin | _Follow]) -> None:
        """Write the items of the queue to the recording. After a failure, the recording continues with the last item
        that begins a segment; the items before it are skipped."""
        begins = [place for place, item in enumerate(items) if isinstance(item, _Begin)]
        if self._failure:
            items = items[begins[-1] :] if begins else []
        batches: list[Batch] = []
        step: int | None = None
        for item in items:
            if isinstance(item, _Begin):
                writer.add(batches, step)
                batches = []
                follows = item.follows and not self._failure
                state = list(map(codec.pack, item.state))
                self._snapshot_bytes = sum(map(len, state))
                writer.begin(item.epoch, item.seq, item.time_s, item.step, follows, state)
            else:
                batches.append(Batch(item.time_s, item.first, list(map(Raw, item.packed))))
                step = item.step
        writer.add(batches, step)
        if items:
            writer.commit()
            self._failure = None
        writer.make_room()
