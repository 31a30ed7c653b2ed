"""One pass over what is new to a client that wants the newest alone, in as many frames as it takes."""

import time
from collections.abc import Iterator

from agents import protocol
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import codec


class LatestPass:
    """What has changed after `since`. Each thing is taken as it is when its frame is made: newest wins.

    Only the last frame moves the client on, to `reaches`: a client that lost one gets the whole lap again.
    """

    def __init__(self, update_log: UpdateLog, since: int, ranks: bool) -> None:
        self.reaches = update_log.seq
        self.done = False
        self._update_log = update_log
        self._since = since
        self._changes: Iterator[bytes] = update_log.newest.after(since, ranks)
        self._held: bytes | None = None  # packed, and did not fit into the last frame

    def frame(self, most: int = 0) -> bytes:
        """The next frame, of at most about `most` bytes (0: as a frame may have), but always one update."""
        room = min(most or protocol.MESSAGE_BYTES, protocol.MESSAGE_BYTES)
        packed = [self._held] if self._held else []
        room -= sum(map(len, packed))
        self._held = None
        self.done = True
        for one in self._changes:
            if packed and len(one) > room:
                self._held, self.done = one, False
                break
            packed.append(one)
            room -= len(one)
        seq = self.reaches if self.done else self._since
        return codec.updates_frame(self._update_log.epoch, seq, packed, time_s=time.time(), since=self._since)
