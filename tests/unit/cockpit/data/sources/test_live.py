"""Tests of the cockpit's connection to a live run. In a cockpit without the operator role (a viewer), the connection
itself rejects every request to change the run, and does not rely on the screens to prevent such requests. After a
restart of the hub, the connection is restored."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents.protocol import Decide, Preview, Propose, Pulse, Summary, Try, Update
from agents.state.run_state import RunState
from cockpit.data.diagnosis.diagnosis import Level, diagnosis
from cockpit.data.diagnosis.status import status_word
from cockpit.data.log.run_log import marks
from cockpit.data.sources.live import PART, LiveSource, note_in_parts
from cockpit.data.sources.source import ViewerError
from cockpit.data.store import Store, Topic
from cockpit.tui.open import report_fault
from tests.unit.agents.fleet import Fleet, HubProcess


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    process = HubProcess(tmp_path / "run").start()
    yield process
    process.clean_up()


def until(true: Callable[[], object], turn: Callable[[], None]) -> None:
    deadline = time.monotonic() + 15
    while not true():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        turn()
        time.sleep(0.02)


def test_a_source_reduces_every_update_once(hub: HubProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[Update] = []
    apply = RunState.apply

    def counted(state: RunState, update: Update) -> None:
        reduced.append(update)
        apply(state, update)

    monkeypatch.setattr(RunState, "apply", counted)
    fleet, store = Fleet(hub.endpoints.ranks), Store()
    source = LiveSource(hub.endpoints.clients)
    try:
        source.start(store)
        until(
            lambda: store.state.board and store.state.summaries and store.step == fleet.step > 20, fleet.turn
        )
    finally:
        source.stop()
        fleet.close()
    steps = [update.step for update in reduced if isinstance(update, Summary)]
    assert len(steps) > 15 and len(steps) == len(set(steps))
    assert store.revisions[Topic.CURVES] >= len(steps)


def test_the_store_is_free_between_the_updates_of_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    updates = [Pulse(rank, 1, "forward", 0.0) for rank in range(2 * PART + 1)]
    seen: list[int] = []  # what another thread, such as the screen's, sees when it gets the lock

    def other_thread(_gap_s: float) -> None:
        reader = threading.Thread(target=lambda: seen.append(_noted(store)))
        reader.start()
        reader.join(10)

    monkeypatch.setattr("cockpit.data.sources.live.time.sleep", other_thread)
    note_in_parts(store, updates)
    assert seen == [PART, 2 * PART]
    assert store.revisions[Topic.PULSE] == 2 * PART + 1


def _noted(store: Store) -> int:
    with store.lock:
        return store.revisions[Topic.PULSE]


def test_a_source_fills_the_store_and_sends_a_change(hub: HubProcess) -> None:
    fleet, store = Fleet(hub.endpoints.ranks), Store()
    viewer, operator = LiveSource(hub.endpoints.clients), LiveSource(hub.endpoints.clients, operator=True)
    try:
        operator.start(store)
        until(lambda: store.state.board and store.world == 4 and store.step, fleet.turn)
        request = "wish"
        with pytest.raises(ViewerError, match="to change the run: cockpit attach RUN --operator"):
            viewer.ask(Propose(request, {"micro_batches": 8}, 0))
        operator.ask(Propose(request, {"micro_batches": 8}, 0))
        until(lambda: request in store.state.commands and store.state.commands[request].settled, fleet.turn)
        assert store.state.commands[request].state == "applied"
        hub.kill()
        hub.start()
        step = store.step or 0
        known = set()

        def turn() -> None:
            known.add(store.world)
            fleet.turn()

        until(lambda: (store.step or 0) > step + 3 and (store.age_s or 9.0) < 1.0, turn)
        assert known == {4}, "the last picture stays until the ranks have joined the new hub"
        assert [mark.label for mark in marks(store)] == ["micro_batches 4→8"]
    finally:
        operator.stop()
        fleet.close()


def test_answers_go_only_to_the_source_that_asked(hub: HubProcess) -> None:
    fleet, store, other = Fleet(hub.endpoints.ranks), Store(), Store()
    viewer, operator = LiveSource(hub.endpoints.clients), LiveSource(hub.endpoints.clients, operator=True)
    try:
        viewer.start(store)
        operator.start(other)
        until(lambda: store.state.board and other.state.board, fleet.turn)
        for ask in (Try("t", {"micro_batches": 8}, 4), Decide(True, "t"), Propose("u", {}, undo=True)):
            with pytest.raises(ViewerError):
                viewer.ask(ask)
        viewer.ask(Preview("q", {"micro_batches": 8}))
        until(lambda: "q" in store.previews, fleet.turn)
        assert "do not support previews" in store.previews["q"].why
        assert not other.previews
        # the name is too long, so it is refused before it is sent
        operator.ask(Try("t" * 49, {"micro_batches": 8}, 4))
        until(lambda: other.denied, fleet.turn)
        assert list(other.denied) == ["t" * 49] and not other.state.trials
        operator.ask(Try("t", {"micro_batches": 8}, 4))
        until(lambda: "t" in store.state.trials, fleet.turn)
        operator.ask(Decide(False, "t"))
        until(lambda: store.state.trials["t"].settled, fleet.turn)
    finally:
        viewer.stop()
        operator.stop()
        fleet.close()


class BrokenClient:
    resets, age_s = 0, 0.1

    def __init__(self, *_: object) -> None: ...

    def request_samples(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def changes(self, timeout_s: float) -> list[object]:
        raise KeyError("[/x]")


def test_a_fault_in_the_sources_thread_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cockpit.data.sources.live.Client", BrokenClient)
    store, source = Store(), LiveSource("ipc://nowhere", operator=True, target="r-1")
    source.start(store)
    until(lambda: status_word(store) == ("DETACHED", Level.BAD), lambda: None)
    said = diagnosis(store)
    assert said.level is Level.BAD
    assert said.text == (
        "an internal error detached this cockpit: KeyError: '[/x]' · the run continues: cockpit attach r-1"
    )
    with pytest.raises(ViewerError, match="this cockpit is detached; the run continues: cockpit attach r-1"):
        source.ask(Propose("wish", {"micro_batches": 8}, 0))
    assert report_fault(store)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0].startswith("Traceback") and printed[-1].endswith("cockpit attach r-1")
