"""Questions on their way from a client to the leader, and the answers back: what would a change do?"""

from collections.abc import Callable
from dataclasses import dataclass

from agents.roster import Roster
from agents.sequence import Sequence
from agents.wire import PREVIEWS, Message, Preview, Previewed

OPEN = 256  # questions at once; the oldest gives way
FORGOTTEN_AFTER_S = 30.0
AGAIN_S = 2.0  # before a question that is asked again is handed on again

Send = Callable[[bytes, Message], object]


@dataclass
class _Open:
    client: bytes
    asked_s: float


class Questions:
    """Nothing of it is kept: who gets no answer asks again."""

    def __init__(self, sequence: Sequence, roster: Roster, tell: Send) -> None:
        self._sequence, self._roster = sequence, roster
        self._tell = tell
        self._open: dict[str, _Open] = {}

    def ask(self, client: bytes, preview: Preview, now: float) -> None:
        """Hand a question on to the leader, or answer it where there is nobody who could."""
        board, leader = self._sequence.state.board, self._roster.leader
        if board is None or leader is None:
            why = "no rank is here to say what this would do; ask again when the run has started"
        elif PREVIEWS not in leader.capabilities:
            why = "the ranks of this run do not say what a change would do"
        else:
            asked = self._open.get(preview.id)
            if asked is None or now - asked.asked_s >= AGAIN_S:
                self._remember(preview.id, _Open(client, now))
                self._tell(self._roster.identity(leader.rank), preview)
            return
        revision = board.revision if board else 0
        self._tell(client, Previewed(preview.id, preview.changes, revision, why))

    def answer(self, previewed: Previewed) -> None:
        """Hand the leader's answer to the client that asked."""
        asked = self._open.pop(previewed.id, None)
        if asked:
            self._tell(asked.client, previewed)

    def _remember(self, id: str, asked: _Open) -> None:
        for old, known in list(self._open.items()):
            if asked.asked_s - known.asked_s > FORGOTTEN_AFTER_S or len(self._open) >= OPEN:
                del self._open[old]
        self._open[id] = asked
