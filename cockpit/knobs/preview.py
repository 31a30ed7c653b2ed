"""What the marked changes would do: asked of the run once they have stood for a moment, and told for them alone.

Textual-free, and no clock of its own: the store's, at every look.
"""

import uuid
from collections.abc import Callable, Mapping

from agents.protocol import PREVIEWS, Preview, Previewed, Value
from cockpit.data.store import Store

SETTLED_S = 0.25  # that marks stand before they are asked about: nobody means what lies on the way
GAP_S = 0.5  # at least, between two questions
AGAIN_S = 10.0  # the run goes on while a person thinks, and so do its numbers
PATIENCE_S = 5.0  # until a word on that nobody has answered

_About = tuple[int, tuple[tuple[str, type, Value], ...]]
"""A board's revision and changes of it: 1, 1.0 and true are three things."""


class PreviewQuery:
    """The question of one board. `answer` is that to the changes given last, or there is none and `word` says why."""

    def __init__(self, ask: Callable[[Preview], None]) -> None:
        self.answer: Previewed | None = None
        self.word = ""
        self._ask = ask
        self._about: _About | None = None
        self._since = 0.0
        self._id = ""  # of the question that is open
        self._asked_s: float | None = None  # of the newest question about what it is about now
        self._last_s = -GAP_S  # of the newest question at all

    def look(self, store: Store, changes: Mapping[str, Value]) -> None:
        """`changes` are what is meant now. Called at every look, with the store's lock held."""
        board, now = store.state.board, store.clock()
        about = (board.revision if board else 0, _exactly(changes))
        if about != self._about:
            self._about, self._since = about, now
            self.answer, self._id, self._asked_s = None, "", None
        found = store.previews.get(self._id)
        if found:
            self.answer, self._id = found, ""
        self.word = "" if self.answer or not changes else self._word(store, now)
        if not changes or not answers(store) or now - self._since < SETTLED_S:
            return
        if now - self._last_s >= GAP_S and (self._asked_s is None or now - self._asked_s >= AGAIN_S):
            self._id, self._asked_s, self._last_s = uuid.uuid4().hex, now, now
            self._ask(Preview(self._id, dict(changes)))

    def _word(self, store: Store, now: float) -> str:
        if not answers(store):
            return "this run does not say what a change would do"
        if self._id in store.denied:
            return store.denied[self._id]
        if self._asked_s is not None and now - self._asked_s >= PATIENCE_S:
            return "nobody has said yet what this would do; it is asked again"
        return "asking the run what this would do"


def answers(store: Store) -> bool:
    """Whether the ranks of this run can say what a change would do, by their own word."""
    return any(hello.leader and PREVIEWS in hello.capabilities for hello in store.state.hellos.values())


def _exactly(changes: Mapping[str, Value]) -> tuple[tuple[str, type, Value], ...]:
    return tuple((name, type(value), value) for name, value in sorted(changes.items()))
