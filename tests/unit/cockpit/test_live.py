"""Read-only holds below the keys, and a live feed follows a hub through its restart."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cockpit.feed import ViewerError
from cockpit.live import LiveFeed
from cockpit.store import Store
from tests.unit.agents.fleet import Fleet, HubProcess


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    process = HubProcess(tmp_path / "run").start()
    yield process
    process.clean_up()


def until(true: Callable[[], object], turn: Callable[[], None]) -> None:
    deadline = time.monotonic() + 15
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        turn()
        time.sleep(0.02)


def test_a_feed_fills_the_store_and_carries_a_change(hub: HubProcess) -> None:
    fleet, store = Fleet(hub.endpoints.ranks), Store()
    viewer, operator = LiveFeed(hub.endpoints.clients), LiveFeed(hub.endpoints.clients, operator=True)
    try:
        operator.start(store)
        until(lambda: store.state.board and store.world == 4 and store.step, fleet.turn)
        with pytest.raises(ViewerError):
            viewer.propose({"micro_batches": 8}, 0)
        wish = operator.propose({"micro_batches": 8}, 0)
        until(lambda: wish in store.state.commands and store.state.commands[wish].settled, fleet.turn)
        assert store.state.commands[wish].state == "applied"
        hub.kill()
        hub.start()
        step = store.step or 0
        until(lambda: (store.step or 0) > step + 3 and (store.age_s or 9.0) < 1.0, fleet.turn)
        assert [mark.label for mark in store.marks()] == ["micro_batches 4→8"]
    finally:
        operator.stop()
        fleet.close()
