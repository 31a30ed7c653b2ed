"""Preview query: asks the run what the pending changes would do, once they have been stable for a moment.

Textual-free; times are those of the store's clock.
"""

import uuid
from collections.abc import Callable, Mapping

from agents.protocol import PREVIEWS, Preview, Previewed, Value
from cockpit.data.store import Store

STABLE_S = 0.25  # changes are queried after this long, so that values stepped over are not
GAP_S = 0.5  # between two queries, at least
REPEAT_S = 10.0  # the run goes on while a user thinks, so the estimates are renewed
ANSWER_TIMEOUT_S = 5.0  # without an answer, until the board says so

_Subject = tuple[int, tuple[tuple[str, type, Value], ...]]
"""A revision and changes of it; 1, 1.0 and true differ."""


class PreviewQuery:
    """The preview query of one board. `answer` is for the present changes; while it is None, `status` says why."""

    def __init__(self, ask: Callable[[Preview], None]) -> None:
        self.answer: Previewed | None = None
        self.status = ""
        self._ask = ask
        self._subject: _Subject | None = None
        self._since_s = 0.0  # when the subject last changed
        self._id = ""  # of the open query
        self._subject_asked_s: float | None = None  # newest query on the present subject
        self._asked_s = -GAP_S  # newest query on any subject

    def update(self, store: Store, changes: Mapping[str, Value]) -> None:
        """Take the answer to the present `changes`, or send a query. Called with the store's lock held."""
        board, now = store.state.board, store.clock()
        subject = (board.revision if board else 0, _with_types(changes))
        if subject != self._subject:
            self._subject, self._since_s = subject, now
            self.answer, self._id, self._subject_asked_s = None, "", None
        answer = store.previews.get(self._id)
        if answer:
            self.answer, self._id = answer, ""
        self.status = "" if self.answer or not changes else self._status(store, now)
        if not changes or not supported(store) or now - self._since_s < STABLE_S:
            return
        due = self._subject_asked_s is None or now - self._subject_asked_s >= REPEAT_S
        if due and now - self._asked_s >= GAP_S:
            self._id, self._subject_asked_s, self._asked_s = uuid.uuid4().hex, now, now
            self._ask(Preview(self._id, dict(changes)))

    def _status(self, store: Store, now: float) -> str:
        if not supported(store):
            return "this run does not support previews"
        if self._id in store.denied:
            return store.denied[self._id]
        if self._subject_asked_s is not None and now - self._subject_asked_s >= ANSWER_TIMEOUT_S:
            return f"no preview answer within {ANSWER_TIMEOUT_S:.0f} s; the query is repeated"
        return "waiting for the run's preview"


def supported(store: Store) -> bool:
    """Whether the leader rank reports that it can answer preview queries."""
    return any(hello.leader and PREVIEWS in hello.capabilities for hello in store.state.hellos.values())


def _with_types(changes: Mapping[str, Value]) -> tuple[tuple[str, type, Value], ...]:
    return tuple((name, type(value), value) for name, value in sorted(changes.items()))
