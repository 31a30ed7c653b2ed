"""The connection of a client to a run: its state, the position in a recording, and a fault that ended it."""

from dataclasses import dataclass
from enum import Enum


class LinkState(Enum):
    """State of the connection to the run; the value is the word in the status line."""

    WAITING = "WAITING"
    LIVE = "LIVE"
    PLAYBACK = "PLAYBACK"
    STALE = "STALE"
    ENDED = "ENDED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class PlaybackPosition:
    """A position in a recording. Times are Unix times of the hub's clock."""

    at_s: float
    first_s: float
    last_s: float
    speed: float
    paused: bool
    thinned: bool  # whether the recording no longer has the records of single ranks at this time

    @property
    def share(self) -> float:
        """The position as a fraction: 0 at the beginning of the recording, 1 at its end."""
        length = self.last_s - self.first_s
        return min(1.0, max(0.0, (self.at_s - self.first_s) / length)) if length > 0 else 1.0


@dataclass(frozen=True)
class Fault:
    """An unexpected error that ended a source: the error in one line, how to continue, and the traceback."""

    error: str
    how_to_continue: str
    trace: str
