"""The update log: numbers all updates of a run, and keeps the newest ones, so that subscribers can catch up."""

import secrets
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

from agents.hub.telemetry.latest import Latest
from agents.protocol import Alert, CommandState, Event, Gone, TrialState, Update, codec
from agents.protocol.codec import Skimmed
from agents.state.run_state import RunState
from agents.transport.frame_filling import chunks

LOG_UPDATES = 32_768
LOG_BYTES = 16 << 20
# Updates that the hub builds from other data. They are checked when they are published; all other updates were checked
# when they were received.
OF_THE_HUB = (CommandState, TrialState, Event, Alert, Gone)
BATCH = 256  # number of updates in a batch; the log drops whole batches


@dataclass
class _Batch:
    """Consecutive packed updates."""

    updates: list[bytes]
    size: int = 0  # bytes


class UpdateLog:
    """Numbers updates from 1, applies them to the run's state, and keeps the newest ones.

    Small records of ranks are forwarded without decoding; `newest.read` decodes the latest ones into `state`.
    """

    def __init__(self, log_updates: int = LOG_UPDATES, log_bytes: int = LOG_BYTES) -> None:
        self.epoch = secrets.token_hex(8)
        self.state = RunState()
        self.newest = Latest(self.state)
        self.seq = 0
        self._log: deque[_Batch] = deque([_Batch([])])  # the last batch ends with update number `seq`
        self._kept = 0
        self._bytes = 0
        self._limits = (log_updates, log_bytes)
        self._snapshots: dict[bool, tuple[int, list[bytes]]] = {}

    def publish(self, update: Update) -> None:
        """Publish `update` under the next sequence number. Raises WireError if the update is too large for a frame; the
        next update then gets this number.
        """
        packed = codec.pack(update)
        why = codec.unreadable(packed) if isinstance(update, OF_THE_HUB) else ""
        if why:  # such a message would make its frame and every later snapshot unreadable for clients
            kind = type(update).__name__.lower()
            text = f"an unreadable {kind} is omitted: {why}"
            update = Event(time.time(), "error", "hub", text)
            packed = codec.pack(update)
        self.newest.add(self.seq + 1, update, packed)
        self._keep([packed], len(packed))

    def publish_records(self, records: Skimmed) -> None:
        """Publish small records of ranks under the next sequence numbers."""
        self.newest.add_records(self.seq + 1, records)
        self._keep(records.packed, sum(map(len, records.packed)))

    def _keep(self, updates: List[bytes], size: int) -> None:
        self.seq += len(updates)
        newest = self._log[-1]
        if len(newest.updates) >= BATCH:
            newest = _Batch([])
            self._log.append(newest)
        newest.updates += updates
        newest.size += size
        self._kept += len(updates)
        self._bytes += size
        while self._kept > self._limits[0] or self._bytes > self._limits[1]:
            oldest = self._log.popleft()
            self._kept -= len(oldest.updates)
            self._bytes -= oldest.size
            if not self._log:
                self._log.append(_Batch([]))

    def holds(self, epoch: str, seq: int) -> bool:
        """Whether `epoch` identifies this hub process and the log still has every update after number `seq`."""
        return epoch == self.epoch and self.seq - self._kept <= seq <= self.seq

    def after(self, seq: int) -> list[bytes]:
        """Every update after `seq`, packed. Call this only if the log still holds these updates (`holds`)."""
        missing = self.seq - seq
        batches: list[list[bytes]] = []
        for batch in reversed(self._log):
            if missing <= 0:
                break
            batches.append(batch.updates[max(0, len(batch.updates) - missing) :])
            missing -= len(batch.updates)
        return [one for batch in reversed(batches) for one in batch]

    def frames_after(self, seq: int) -> Iterator[tuple[int, bytes]]:
        """The updates after `seq`, packed into frames: yields each frame with the sequence number of its last update.
        Call this only if the log still holds these updates (`holds`).
        """
        for chunk in chunks(self.after(seq)):
            seq += len(chunk)
            yield seq, codec.updates_frame(self.epoch, seq, chunk, time_s=time.time())

    def heartbeat(self, seq: int) -> bytes:
        """An empty frame, which tells a client that the hub is alive and has no update after `seq`."""
        return codec.updates_frame(self.epoch, seq, (), time_s=time.time())

    def snapshot(self, ranks: bool = True) -> list[bytes]:
        """The frames from which a client rebuilds the current state; cached until the next update."""
        known = self._snapshots.get(ranks)
        if known is None or known[0] != self.seq:
            parts = list(chunks(map(codec.pack, self.newest.all(ranks)))) or [[]]
            now = time.time()
            frames = [
                codec.updates_frame(
                    self.epoch, self.seq, chunk, begins=place == 0, snapshot=len(parts) - place, time_s=now
                )
                for place, chunk in enumerate(parts)
            ]
            known = self._snapshots[ranks] = (self.seq, frames)
        return known[1]
