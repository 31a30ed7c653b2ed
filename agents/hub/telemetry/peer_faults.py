"""What peers do wrong, told to people without drowning them: per kind one event in a while, with a count."""

import time
from dataclasses import dataclass
from typing import Literal

from agents.hub.rate_limit import RateLimit
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import TEXT, Event, clip

EVERY_S = 5.0
REFUSALS_A_SECOND = 5  # to one peer
PEERS_A_SECOND = 4096  # that are refused anything

Kind = Literal[
    "door", "frame", "key", "kind", "newer", "notify", "number", "peers", "rank", "refused", "size"
]


@dataclass
class _Told:
    at_s: float
    untold: int = 0


class PeerFaults:
    """Publishes complaints as events, and says whether the offender may be sent a refusal now."""

    def __init__(self, update_log: UpdateLog) -> None:
        self._update_log = update_log
        self._told: dict[Kind, _Told] = {}
        self._refusals = RateLimit(REFUSALS_A_SECOND, PEERS_A_SECOND)

    def add(self, kind: Kind, text: str) -> None:
        now = time.monotonic()
        told = self._told.get(kind)
        if told and now - told.at_s < EVERY_S:
            told.untold += 1
            return
        more = f" (and {told.untold} more like it)" if told and told.untold else ""
        self._told[kind] = _Told(now)
        self._update_log.publish(Event(time.time(), "warning", "hub", clip(text[: TEXT // 2] + more)))

    def may_refuse(self, identity: bytes) -> bool:
        """False when this peer has had refusals enough this second: a flood earns no answer each."""
        return self._refusals.allows(identity, time.monotonic())
