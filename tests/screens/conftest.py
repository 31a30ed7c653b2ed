"""A cockpit on a scripted run: no trainer, no socket, and a clock that stands still unless it is told to move."""

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


class ScriptedFeed:
    """Hands a story to the store at once; takes more by `tell`; remembers what was asked for."""

    target = "demo-0001"
    owns_run = False

    def __init__(self, story: Iterator[Update], operator: bool = True) -> None:
        self.operator = operator
        self.requests: list[Request] = []
        self.questions: list[Preview] = []
        self.stopped = False
        self.story = story
        self._store = Store()

    def start(self, store: Store) -> None:
        self._store = store
        self.tell(self.story)

    def stop(self) -> None:
        self.stopped = True

    def tell(self, updates: Iterator[Update]) -> None:
        with self._store.lock:
            self._store.apply(updates)
            self._store.set_message_age(0.4)

    def ask(self, asked: Request) -> None:
        if not self.operator and not isinstance(asked, Preview):
            raise ViewerError("this cockpit only watches")
        if isinstance(asked, Preview):
            self.questions.append(asked)
        else:
            self.requests.append(asked)

    @property
    def asked(self) -> list[dict[str, Value]]:
        """The changes that were proposed, oldest first."""
        return [request.changes for request in self.requests if isinstance(request, Propose)]

    def answer(self, *estimates: Estimate, number: int = -1, why: str = "", neutral: bool = True) -> None:
        """What the hub says to the newest question, or to that of this number."""
        question = self.questions[number]
        said = Previewed(question.id, question.changes, 0, why, neutral, list(estimates))
        with self._store.lock:
            self._store.set_answers({**self._store.previews, question.id: said}, self._store.denied)

    def deny(self, id: str, why: str) -> None:
        with self._store.lock:
            self._store.set_answers(self._store.previews, {**self._store.denied, id: why})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Cockpit:
    """An app with the strings that move it."""

    def __init__(self, run: FakeRun, steps: int, change_at: int | None, operator: bool) -> None:
        self.run = run
        self.clock = Clock()
        self.feed = ScriptedFeed(run.story(steps, change_at), operator)
        self.store = Store(self.clock)
        self.app = CockpitApp(self.feed, self.store, refreshes_per_s=1)


MakeCockpit = Callable[..., Cockpit]


@pytest.fixture
def make_cockpit(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCockpit]:
    """A cockpit on a fake run, 160 steps old by default."""
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
