"""Reports errors of peers, such as malformed frames, as events in the run's log: for each kind of error, at most one
event every `EVENT_PERIOD_S` seconds, with the number of further errors.
"""

import time
from dataclasses import dataclass
from typing import Literal

from agents.hub.rate_limit import RateLimit
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import TEXT, Event, clip

EVENT_PERIOD_S = 5.0
REFUSALS_PER_S = 5  # maximum number of refusals per second to one peer
PEERS_PER_S = 4096  # maximum number of peers that get a refusal within one second

Kind = Literal[
    "connection", "frame", "key", "kind", "newer", "notify", "number", "peers", "rank", "refused", "size"
]


@dataclass
class _Reported:
    at_s: float
    suppressed: int = 0


class PeerFaults:
    """Publishes errors of peers as events, and limits how many refusals are sent to each peer."""

    def __init__(self, update_log: UpdateLog) -> None:
        self._update_log = update_log
        self._reported: dict[Kind, _Reported] = {}
        self._refusals = RateLimit(REFUSALS_PER_S, PEERS_PER_S)

    def add(self, kind: Kind, text: str) -> None:
        now = time.monotonic()
        reported = self._reported.get(kind)
        if reported and now - reported.at_s < EVENT_PERIOD_S:
            reported.suppressed += 1
            return
        more = f" (and {reported.suppressed} more like it)" if reported and reported.suppressed else ""
        self._reported[kind] = _Reported(now)
        self._update_log.publish(Event(time.time(), "warning", "hub", clip(text[: TEXT // 2] + more)))

    def may_refuse(self, identity: bytes) -> bool:
        """Whether one more refusal may be sent to this peer within the rate limit."""
        return self._refusals.allows(identity, time.monotonic())
