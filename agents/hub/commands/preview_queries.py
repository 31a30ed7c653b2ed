"""Forwards preview queries from clients to the leader rank, and the answers back to the clients."""

from collections.abc import Callable
from dataclasses import dataclass

from agents.hub.rate_limit import RateLimit
from agents.hub.telemetry.membership import Membership
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import PREVIEWS, Message, Preview, Previewed

RETRY_S = 2.0  # if a client's last query has no answer, its next one is forwarded after this time
FORGOTTEN_AFTER_S = 30.0
QUERIES_PER_S = 8  # maximum rate of queries to the leader, from all clients together

Send = Callable[[bytes, Message], object]


@dataclass
class _Pending:
    id: str
    sent_s: float


class PreviewQueries:
    """Pending preview queries, one per client. Queries are not stored on disk: a client that gets no answer repeats its
    query. The rate of queries is limited, because each query takes time on the leader.
    """

    def __init__(self, update_log: UpdateLog, membership: Membership, send: Send) -> None:
        self._update_log, self._membership = update_log, membership
        self._send = send
        self._pending: dict[bytes, _Pending] = {}  # by client
        self._rate = RateLimit(QUERIES_PER_S)

    def ask(self, client: bytes, preview: Preview, now: float) -> None:
        """Forward a preview query to the leader rank. If no rank can answer the query, tell the client the reason."""
        board, leader = self._update_log.state.board, self._membership.leader
        if board is None or leader is None:
            why = "no rank is connected to answer previews; try again when the run has started"
        elif PREVIEWS not in leader.capabilities:
            why = "the ranks of this run do not support previews"
        else:
            pending = self._pending.get(client)
            if (pending is None or now - pending.sent_s >= RETRY_S) and self._rate.allows("", now):
                self._remember(client, _Pending(preview.id, now))
                self._send(self._membership.identity(leader.rank), preview)
            return
        revision = board.revision if board else 0
        self._send(client, Previewed(preview.id, preview.changes, revision, why))

    def answer(self, previewed: Previewed) -> None:
        """Forward the leader's answer to the client that asked."""
        for client in [client for client, pending in self._pending.items() if pending.id == previewed.id]:
            del self._pending[client]
            self._send(client, previewed)

    def _remember(self, client: bytes, pending: _Pending) -> None:
        for old, known in list(self._pending.items()):  # the list is short, because `QUERIES_PER_S` limits it
            if pending.sent_s - known.sent_s > FORGOTTEN_AFTER_S:
                del self._pending[old]
        self._pending[client] = pending
