"""Preview query: asks the run for the effect of the pending changes, once they have been stable for a moment."""

import uuid
from collections.abc import Callable, Mapping

from agents.protocol import PREVIEWS, Preview, Previewed, Value
from cockpit.data.store import Store

STABLE_S = 0.25  # a query is sent when the edits have not changed for this long
GAP_S = 0.5  # minimum time between two queries
REPEAT_S = 10.0  # the query is sent again after this long, because the run continues while the user decides
ANSWER_TIMEOUT_S = 5.0  # after this long without an answer, the board reports it

_Subject = tuple[int, tuple[tuple[str, type, Value], ...]]
"""A revision and the changes to it, with their types: 1, 1.0 and true differ."""


class PreviewQuery:
    """The query that asks the run to preview the pending edits of one knob board. `answer` is the run's preview of the
    edits as they are now. While `answer` is None, `status` says why."""

    def __init__(self, ask: Callable[[Preview], None]) -> None:
        self.answer: Previewed | None = None
        self.status = ""
        self._ask = ask
        self._subject: _Subject | None = None
        self._since_s = 0.0  # when the edits or the board last changed
        self._id = ""  # id of the open query
        self._subject_asked_s: float | None = None  # time of the newest query for the current edits
        self._asked_s = -GAP_S  # time of the newest query for any edits

    def update(self, store: Store, changes: Mapping[str, Value]) -> None:
        """Read the run's preview of `changes` if it has arrived; otherwise send a query if it is time for one. The
        caller holds the store's lock."""
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
