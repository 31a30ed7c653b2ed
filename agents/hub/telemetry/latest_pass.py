"""One pass over what is new to a client that wants the newest alone, in as many frames as it takes."""

import time

from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import MESSAGE_BYTES, codec
from agents.protocol.frame_filling import FrameFiller


class LatestPass:
    """What has changed after `since`. Each thing is taken as it is when its frame is made: newest wins.

    Only the last frame moves the client on, to `reaches`: a client that lost one gets the whole lap again.
    """

    def __init__(self, update_log: UpdateLog, since: int, ranks: bool) -> None:
        self.reaches = update_log.seq
        self.done = False
        self._update_log = update_log
        self._since = since
        changes = update_log.newest.after(since, ranks)
        self._frames = FrameFiller(lambda: next(changes, None))

    def frame(self, most: int = 0) -> bytes:
        """The next frame, of at most about `most` bytes (0: as a frame may have), but always one update."""
        packed = self._frames.fill(most or MESSAGE_BYTES)
        self.done = self._frames.pending is None
        seq = self.reaches if self.done else self._since
        return codec.updates_frame(self._update_log.epoch, seq, packed, time_s=time.time(), since=self._since)
