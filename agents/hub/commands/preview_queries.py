"""Questions on their way from a client to the leader, and the answers back: what would a change do?"""

from collections.abc import Callable
from dataclasses import dataclass

from agents.hub.rate_limit import RateLimit
from agents.hub.telemetry.membership import Membership
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import PREVIEWS, Message, Preview, Previewed

AGAIN_S = 2.0  # a client's question is waited for; then its next is handed on, or the same again
FORGOTTEN_AFTER_S = 30.0
A_SECOND = 8  # handed on to the leader, of all clients together

Send = Callable[[bytes, Message], object]


@dataclass
class _Open:
    id: str
    asked_s: float


class PreviewQueries:
    """Nothing of it is kept: who gets no answer asks again. A client has one question on its way, and all together few
    a second, for they cost the leader's time."""

    def __init__(self, update_log: UpdateLog, membership: Membership, tell: Send) -> None:
        self._update_log, self._membership = update_log, membership
        self._tell = tell
        self._open: dict[bytes, _Open] = {}  # by client
        self._rate = RateLimit(A_SECOND)

    def ask(self, client: bytes, preview: Preview, now: float) -> None:
        """Hand a question on to the leader, or answer it where there is nobody who could."""
        board, leader = self._update_log.state.board, self._membership.leader
        if board is None or leader is None:
            why = "no rank is here to say what this would do; ask again when the run has started"
        elif PREVIEWS not in leader.capabilities:
            why = "the ranks of this run do not say what a change would do"
        else:
            asked = self._open.get(client)
            if (asked is None or now - asked.asked_s >= AGAIN_S) and self._rate.allows("", now):
                self._remember(client, _Open(preview.id, now))
                self._tell(self._membership.identity(leader.rank), preview)
            return
        revision = board.revision if board else 0
        self._tell(client, Previewed(preview.id, preview.changes, revision, why))

    def answer(self, previewed: Previewed) -> None:
        """Hand the leader's answer to the client that asked."""
        for client in [client for client, asked in self._open.items() if asked.id == previewed.id]:
            del self._open[client]
            self._tell(client, previewed)

    def _remember(self, client: bytes, asked: _Open) -> None:
        for old, known in list(self._open.items()):  # at most `A_SECOND` came in each second
            if asked.asked_s - known.asked_s > FORGOTTEN_AFTER_S:
                del self._open[old]
        self._open[client] = asked
