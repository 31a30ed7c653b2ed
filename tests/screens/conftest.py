"""A cockpit on a scripted run: no trainer, no socket, and a clock that stands still unless it is told to move."""

import os
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from agents.wire import Update, Value
from cockpit.app import CockpitApp
from cockpit.feed import ViewerError
from cockpit.store import Store
from tests.screens.fake_run import FakeRun


class ScriptedFeed:
    """Hands a story to the store at once; takes more by `tell`; remembers what was asked for."""

    target = "demo-0001"

    def __init__(self, story: Iterator[Update], operator: bool = True) -> None:
        self.operator = operator
        self.asked: list[dict[str, Value]] = []
        self.stopped = False
        self._story = story
        self._store = Store()

    def start(self, store: Store) -> None:
        self._store = store
        self.tell(self._story)

    def stop(self) -> None:
        self.stopped = True

    def tell(self, updates: Iterator[Update]) -> None:
        with self._store.lock:
            self._store.apply(updates)
            self._store.heard(0.4)

    def propose(self, changes: Mapping[str, Value], base: int | None) -> str:
        if not self.operator:
            raise ViewerError("this cockpit only watches")
        self.asked.append(dict(changes))
        return f"asked{len(self.asked)}"


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
        self.app = CockpitApp(self.feed, self.store, looks_per_s=20)


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
