"""A cockpit on a scripted run, without trainer or socket, with a clock that only the test advances."""

import os
import time
from collections.abc import Callable, Iterator

import pytest

from agents.protocol import Estimate, Preview, Previewed, Propose, Update, Value
from agents.requests import Request
from cockpit.data.sources.source import ViewerError
from cockpit.data.store import Store
from cockpit.tui.app import CockpitApp
from tests.screens.fake_run import FakeRun


class ScriptedSource:
    """Replaces the cockpit's connection to a hub: fills the store with the updates of a scripted run, adds more updates
    with `send`, and keeps the requests that the cockpit makes."""

    target = "demo-0001"
    owns_run = False

    def __init__(self, story: Iterator[Update], operator: bool = True) -> None:
        self.operator = operator
        self.requests: list[Request] = []
        self.queries: list[Preview] = []
        self.samples: frozenset[str] = frozenset()
        self.stopped = False
        self.story = story
        self._store = Store()

    def start(self, store: Store) -> None:
        self._store = store
        self.send(self.story)

    def stop(self) -> None:
        self.stopped = True

    def send(self, updates: Iterator[Update]) -> None:
        with self._store.lock:
            self._store.apply(updates)
            self._store.set_message_age(0.4)

    def sample(self, kinds: frozenset[str]) -> None:
        self.samples = kinds

    def ask(self, proposed: Request) -> None:
        if not self.operator and not isinstance(proposed, Preview):
            raise ViewerError("this cockpit only watches")
        if isinstance(proposed, Preview):
            self.queries.append(proposed)
        else:
            self.requests.append(proposed)

    @property
    def proposed(self) -> list[dict[str, Value]]:
        """The knob changes that the cockpit under test has proposed, oldest first."""
        return [request.changes for request in self.requests if isinstance(request, Propose)]

    def answer(self, *estimates: Estimate, number: int = -1, why: str = "", neutral: bool = True) -> None:
        """Answer the newest preview query, or the query with the index `number`."""
        query = self.queries[number]
        answer = Previewed(query.id, query.changes, 0, why, neutral, list(estimates))
        with self._store.lock:
            self._store.set_answers({**self._store.previews, query.id: answer}, self._store.denied)

    def deny(self, id: str, why: str) -> None:
        with self._store.lock:
            self._store.set_answers(self._store.previews, {**self._store.denied, id: why})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Cockpit:
    """The Textual app under test, with its data source, its store and a clock that only the test advances."""

    def __init__(self, run: FakeRun, steps: int, change_at: int | None, operator: bool) -> None:
        self.run = run
        self.clock = Clock()
        self.source = ScriptedSource(run.story(steps, change_at), operator)
        self.store = Store(self.clock)
        self.app = CockpitApp(self.source, self.store, refreshes_per_s=1)


MakeCockpit = Callable[..., Cockpit]


@pytest.fixture
def make_cockpit(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCockpit]:
    """A function that makes a `Cockpit` on a fake run, by default with 160 steps."""
    before = os.environ.get("TZ")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()

    def make(
        run: FakeRun | None = None, steps: int = 160, change_at: int | None = 100, operator: bool = True
    ) -> Cockpit:
        return Cockpit(run or FakeRun(), steps, change_at, operator)

    yield make
    if before is None:
        monkeypatch.delenv("TZ")
    time.tzset()
