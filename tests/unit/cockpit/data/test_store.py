"""The store: derived values, staleness, and replacement by a snapshot."""

import math

import pytest
from msgspec import structs

from agents.protocol import CommandState, Event, Gone, Hello, Pulse, Step, Summary
from cockpit.data.link import LinkState
from cockpit.data.log.run_log import log_entries, marks
from cockpit.data.metrics import STEP_TIME, available, median, read, settled_step
from cockpit.data.store import Store, Topic
from tests.screens.fake_run import FakeRun, big


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    store = Store(clock)
    store.apply(FakeRun().story(20, change_at=10))
    store.set_message_age(0.2)
    return store


def test_link_is_waiting_live_stale_ended_or_failed(clock: Clock) -> None:
    store, run = Store(clock), FakeRun()
    assert store.link is LinkState.WAITING
    store.apply(run.story(5))
    store.set_message_age(0.2)
    assert store.link is LinkState.LIVE
    clock.now += 12
    assert store.link is LinkState.STALE
    store.set_message_age(0.0)
    assert store.link is LinkState.LIVE
    store.apply(Gone(rank, clean=True) for rank in range(8))
    assert store.link is LinkState.ENDED
    store.apply([Gone(3, clean=False, process="ended")])
    assert store.link is LinkState.FAILED


def test_silence_after_the_last_step_is_an_end(clock: Clock) -> None:
    store = Store(clock)
    store.apply(FakeRun(steps=5).story(5))
    store.set_message_age(0.0)
    clock.now += 60
    assert store.link is LinkState.ENDED


@pytest.mark.parametrize(("first", "done"), [(0, 5), (1, 4)])
def test_steps_are_counted_from_the_first_number_of_the_loop(clock: Clock, first: int, done: int) -> None:
    """After step number 4, a run has done 5 steps if its loop counts steps from 0, and 4 if it counts from 1."""
    store, run = Store(clock), FakeRun(steps=5)
    store.apply(
        structs.replace(one, first_step=first) if isinstance(one, Hello) else one for one in run.story(5)
    )
    assert (store.step, store.steps_done, store.finished) == (4, done, done == 5)


def test_coverage_counts_only_ranks_near_the_newest_step(store: Store) -> None:
    assert store.coverage() == "8/8"
    step = store.state.steps[0]
    store.apply([Step(**{name: getattr(step, name) for name in Step.__struct_fields__} | {"step": 25})])
    assert store.coverage() == "1/8"


def test_marks_are_the_applied_changes(store: Store) -> None:
    assert [(mark.step, mark.label) for mark in marks(store)] == [(10, "micro_batches 4→8")]


def test_journal_is_in_order_of_time(store: Store) -> None:
    times = [entry.time_s for entry in log_entries(store)]
    assert times == sorted(times)
    assert any("applied 8/8 at step 10" in entry.text for entry in log_entries(store))


def test_only_changed_topics_get_a_new_revision(store: Store) -> None:
    before = store.revisions.copy()
    store.apply([Pulse(0, 20, "forward", 3.0)])
    moved = {topic for topic in Topic if store.revisions[topic] != before[topic]}
    assert moved == {Topic.PULSE}


def test_once_computes_once_per_revision(store: Store) -> None:
    calls: list[int] = []
    for _ in range(3):
        store.once("x", (Topic.PULSE,), lambda: calls.append(1))
    store.apply([Pulse(0, 20, "forward", 3.0)])
    store.once("x", (Topic.PULSE,), lambda: calls.append(1))
    assert len(calls) == 2


def test_a_frozen_store_does_not_change(store: Store, clock: Clock) -> None:
    still = store.frozen()
    clock.now += 5
    store.apply(FakeRun().step(40))
    assert still.step == 19
    assert still.age_s == pytest.approx(0.2)
    assert store.step == 40


def test_rebuild_forgets_what_the_snapshot_does_not_have(store: Store) -> None:
    store.rebuild(FakeRun(pp=1).story(3))
    assert store.world == 4
    assert store.rank_history.ranks == list(range(4))
    assert store.step == 2


def test_the_history_of_ranks_restarts_after_a_resume(store: Store) -> None:
    store.apply(FakeRun().step(4))
    assert store.rank_history.steps("step") == [0, 1, 2, 3, 4]


def test_readings_are_of_one_step(store: Store) -> None:
    run = FakeRun()
    half = [update for update in run.step(20) if isinstance(update, Step) and update.rank < 4]
    store.apply(half)
    assert settled_step(store) == 19
    assert read(store, STEP_TIME)[0].value != half[0].step_ms


def test_a_slow_rank_deviates_from_its_stage(store: Store) -> None:
    forward = next(metric for metric in available(store) if metric.title == "forward time")
    readings = read(store, forward)
    assert readings[3].deviation == pytest.approx(0.42, abs=0.05)
    assert all(abs(readings[rank].deviation) < 0.1 for rank in range(8) if rank != 3)


def test_a_lost_rank_has_no_value_and_an_ended_rank_keeps_its_last(store: Store) -> None:
    store.apply([Gone(2, clean=False, text="killed")])
    assert read(store, STEP_TIME)[2].value is None
    store.apply([Gone(3, clean=True)])
    assert read(store, STEP_TIME)[3].value is not None


def test_median_ignores_nan() -> None:
    assert median([3.0, math.nan, 1.0, 2.0]) == 2.0
    assert median([]) is None


def test_1024_ranks() -> None:
    store = Store(lambda: 0.0)
    store.apply(big().story(2))
    assert store.coverage() == "1024/1024"
    assert len(read(store, STEP_TIME)) == 1024


def test_ranks_that_report_in_turn_all_count_as_reporting() -> None:
    """With steps of 20 ms, records of two ranks arrive several steps apart."""
    store = Store(lambda: 0.0)
    run = FakeRun(pp=1, dp=2, tp=1, ep=1)
    store.apply(run.story(3))
    records = [update for update in run.step(4) if isinstance(update, Step)]
    summary = next(update for update in run.step(4) if isinstance(update, Summary))
    store.apply([structs.replace(summary, step=100, step_ms=20.0)])
    store.apply([structs.replace(records[0], step=100), structs.replace(records[1], step=60)])
    assert store.coverage() == "2/2"
    store.apply([structs.replace(records[0], step=111)])
    assert store.coverage() == "1/2", "a second later it no longer counts as reporting"
    store.apply([structs.replace(summary, step=200, step_ms=2000.0)])
    store.apply([structs.replace(records[0], step=200), structs.replace(records[1], step=198)])
    assert store.coverage() == "1/2"


def test_the_log_is_computed_once_for_all_panels() -> None:
    store = Store()
    store.apply(FakeRun().story(20, change_at=10))
    once = log_entries(store)
    assert log_entries(store) is once
    store.apply(FakeRun().step(21))
    assert log_entries(store) is once, "none of it is in the log"
    store.apply([Event(1.0, "info", "hub", "now")])
    assert [entry.text for entry in log_entries(store) if entry not in once] == ["now"]


def test_the_log_keeps_its_order_when_the_hubs_clock_jumps() -> None:
    store = Store()
    for revision, time_s in ((1, 300.0), (2, 200.0), (3, 100.0)):
        store.apply([CommandState(f"c{revision}", revision, "applied", {}, {}, "", time_s)])
        store.apply([Event(time_s + 1, "info", "hub", f"after {revision}")])
    told = [entry.command.revision if entry.command else entry.text for entry in log_entries(store)]
    assert told == [1, "after 1", 2, "after 2", 3, "after 3"]
