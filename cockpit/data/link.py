"""The connection of a client to a run: its state, the position in a recording, and a fault that ended the
connection.
"""

from dataclasses import dataclass
from enum import Enum

from agents.state.run_state import RunState

STALE_AFTER_S = 3.0
RECORDING = "recording"  # source of the events that say what could not be read from a recording


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
    thinned: bool  # whether the recording no longer has per-rank records for this time

    @property
    def share(self) -> float:
        """The position as a fraction: 0 at the beginning of the recording, 1 at its end."""
        length = self.last_s - self.first_s
        return min(1.0, max(0.0, (self.at_s - self.first_s) / length)) if length > 0 else 1.0


@dataclass(frozen=True)
class Fault:
    """An unexpected error that stopped the thread from which the cockpit gets its updates: the error in one line, how
    to continue, and the traceback."""

    error: str
    how_to_continue: str
    trace: str


def link_state(state: RunState, age_s: float | None, playing: bool, finished: bool) -> LinkState:
    """The state of the client's connection to the run, such as LIVE or STALE. `age_s`: seconds since the last message
    from the hub; `playing`: whether a recording is the source; `finished`: whether every planned step is done."""
    if not state.hellos:
        return LinkState.WAITING
    if len(state.gone) == len(state.hellos) and all(gone.over for gone in state.gone.values()):
        return LinkState.ENDED if all(gone.clean for gone in state.gone.values()) else LinkState.FAILED
    if playing:
        return LinkState.PLAYBACK
    if age_s is None or age_s > STALE_AFTER_S:
        return LinkState.ENDED if finished else LinkState.STALE
    return LinkState.LIVE
