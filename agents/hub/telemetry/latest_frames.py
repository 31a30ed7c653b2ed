"""Packs what has changed since a client's last update into frames, for a client that skips intermediate updates."""

import time

from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import MESSAGE_BYTES, codec
from agents.transport.frame_filling import FrameFiller


class LatestFrames:
    """Packs the updates after sequence number `since` into frames; a record is left out if a newer record of the same
    kind and rank exists. A frame contains the records that are the newest when the frame is built.

    Only the last frame advances the client's sequence number; the new number is `reaches`. So a client that did not
    receive the last frame gets all these updates again.
    """

    def __init__(self, update_log: UpdateLog, since: int, ranks: bool) -> None:
        self.reaches = update_log.seq
        self.done = False
        self._update_log = update_log
        self._since = since
        changes = update_log.newest.after(since, ranks)
        self._frames = FrameFiller(lambda: next(changes, None))

    def frame(self, most: int = 0) -> bytes:
        """The next frame, with at least one update. `most`: approximate maximum size in bytes (0: the limit of the
        protocol).
        """
        packed = self._frames.fill(most or MESSAGE_BYTES)
        self.done = self._frames.pending is None
        seq = self.reaches if self.done else self._since
        return codec.updates_frame(self._update_log.epoch, seq, packed, time_s=time.time(), since=self._since)
