"""One order for all that happens in a run: numbered updates, the newest kept for those who follow."""

import secrets
import time
from collections.abc import Iterator

from agents import codec
from agents.state import RunState
from agents.wire import Update

LOG_UPDATES = 32_768
LOG_BYTES = 16 << 20


class Sequence:
    """Numbers updates from 1, applies them to the run's state, and keeps the newest to catch up from."""

    def __init__(self, log_updates: int = LOG_UPDATES, log_bytes: int = LOG_BYTES) -> None:
        self.epoch = secrets.token_hex(8)
        self.state = RunState()
        self.seq = 0
        self._log: list[bytes] = []  # packed; the last of them is update number `seq`
        self._bytes = 0
        self._limits = (log_updates, log_bytes)
        self._snapshot: tuple[int, list[bytes]] = (-1, [])

    def publish(self, update: Update) -> None:
        """Give `update` the next number. WireError, and no number is used, if it is too large for a frame."""
        packed = codec.pack(update)
        self.seq += 1
        self.state.apply(update)
        self._log.append(packed)
        self._bytes += len(packed)
        if len(self._log) > self._limits[0] or self._bytes > self._limits[1]:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        # A quarter at once, so that the cost of moving the list is spread over many updates.
        count = max(1, len(self._log) // 4)
        self._bytes -= sum(map(len, self._log[:count]))
        del self._log[:count]

    def holds(self, epoch: str, seq: int) -> bool:
        """Whether one who has everything up to `seq` of `epoch` can be served by updates alone."""
        return epoch == self.epoch and self.seq - len(self._log) <= seq <= self.seq

    def after(self, seq: int) -> list[bytes]:
        """The updates after `seq`, packed; `holds` must be true of it."""
        return self._log[len(self._log) - (self.seq - seq) :]

    def frames_after(self, seq: int) -> Iterator[tuple[int, bytes]]:
        """Frames of the updates after `seq`, each with the number of its last; `holds` must be true of it."""
        for chunk in codec.chunks(self.after(seq)):
            seq += len(chunk)
            yield seq, codec.updates_frame(self.epoch, seq, chunk, time_s=time.time())

    def heartbeat(self) -> bytes:
        """A frame that says only: up to here, and the hub is alive."""
        return codec.updates_frame(self.epoch, self.seq, (), time_s=time.time())

    def snapshot(self) -> list[bytes]:
        """The frames that rebuild the state as of `seq`; built once for all who ask at the same number."""
        if self._snapshot[0] != self.seq:
            chunks = list(codec.chunks(map(codec.pack, self.state.replay()))) or [[]]
            now = time.time()
            frames = [
                codec.updates_frame(
                    self.epoch, self.seq, chunk, begins=place == 0, snapshot=len(chunks) - place, time_s=now
                )
                for place, chunk in enumerate(chunks)
            ]
            self._snapshot = (self.seq, frames)
        return self._snapshot[1]
