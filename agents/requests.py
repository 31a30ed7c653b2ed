"""Sends the requests of a client to the hub, and repeats each request until it is answered or refused, or until its
maximum time (`REPEATED_S`) has passed."""

import math
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from agents.protocol import Decide, Preview, Propose, StackQuery, Try
from agents.state.run_state import RunState

Request = Propose | Try | Decide | Preview | StackQuery
"""A request of a client; it has an id."""

RESEND_S = 1.0  # interval at which a pending request is repeated
REPEATED_S: dict[type, float] = {Decide: 30.0, Preview: 30.0, StackQuery: 30.0}
"""How long a request is repeated. Requests that are not listed are repeated until they are answered."""


@dataclass
class _Pending:
    """A request that has not been answered yet."""

    request: Request
    began_s: float
    sent_s: float = 0.0


class PendingRequests:
    """Requests that are not answered yet. If a request or its answer is lost, the request is sent again."""

    def __init__(self) -> None:
        self._pending: dict[tuple[type, str], _Pending] = {}

    def add(self, request: Request) -> None:
        self._pending[type(request), request.id] = _Pending(request, time.monotonic())

    def withdraw(self, kind: type, id: str) -> None:
        """Stop repeating a request, because its answer is no longer needed."""
        self._pending.pop((kind, id), None)

    def send_due(
        self, send: Callable[[Request], bool], state: RunState, answered_or_denied: Container[str]
    ) -> None:
        """Send each pending request that was not sent in the last `RESEND_S` seconds. Drop requests that were answered
        or refused, or that were repeated for the maximum time (`REPEATED_S`)."""
        now = time.monotonic()
        for key, pending in list(self._pending.items()):
            request = pending.request
            expired = now - pending.began_s > REPEATED_S.get(type(request), math.inf)
            if expired or request.id in answered_or_denied or _answered(request, state):
                del self._pending[key]
            elif now - pending.sent_s >= RESEND_S and send(request):
                pending.sent_s = now


def _answered(request: Request, state: RunState) -> bool:
    """Whether the run's state contains the answer. Always false for queries, because the state does not contain the
    answers to queries.
    """
    trial = state.trials.get(request.id)
    match request:
        case Propose():
            return request.id in state.commands
        case Try():
            return trial is not None
        case Decide():
            return trial is not None and (trial.settled or trial.state == "reverting")
        case Preview() | StackQuery():
            return False
