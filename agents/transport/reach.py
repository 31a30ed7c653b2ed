"""How a rank connects to its hub: the endpoint, the key and, if the rank connects through a relay, the hub as a
fallback."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agents.transport.curve_keys import Key

# A relay whose socket is missing for this long does not come back. A start takes about one second on an idle machine.
RELAY_START_S = 15.0


class Reach(NamedTuple):
    """The endpoint and the key with which a rank connects to a hub, or to a relay that forwards its messages to the
    hub."""

    endpoint: str
    key: Key | None = None  # over TCP
    keys: Path | None = None  # over TCP: the key folder in which `key` was searched for
    fallback: "Fallback | None" = None  # set if `endpoint` is a relay


@dataclass
class Fallback:
    """The hub to which a relay forwards messages. A rank connects to this hub directly if the relay does not start or
    has failed for good.

    When a relay has failed for good, its supervisor removes the directory of the relay's socket.
    """

    hub: Reach
    socket: Path  # the relay's socket
    reports: bool  # whether this rank adds a line to the run's log; one rank of each node does
    _missing_s: float | None = None  # monotonic time since which the socket is missing

    def is_due(self, now: float) -> bool:
        """Whether the rank must now give up the relay and connect to the hub directly; `now` is `time.monotonic()`."""
        if self.socket.exists():
            self._missing_s = None
            return False
        if self._missing_s is None:
            self._missing_s = now
        return not self.socket.parent.is_dir() or now - self._missing_s >= RELAY_START_S
