"""Tests of the medians over ranks that the diagnosis uses when there is no alert."""

import statistics

import pytest

from agents.protocol import Step, Summary
from cockpit.data.diagnosis import bottlenecks
from cockpit.data.diagnosis.diagnosis import diagnosis
from cockpit.data.store import Store
from tests.screens.fake_run import FakeRun


def test_medians_are_computed_once_until_a_rank_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Store] = []
    compute = bottlenecks._medians
    monkeypatch.setattr(bottlenecks, "_medians", lambda store: made.append(store) or compute(store))
    now = 100.0
    store = Store(lambda: now)
    run = FakeRun(oversubscribed=False)
    store.apply(run.story(10))
    store.apply(one for one in run.step(10) if isinstance(one, Step))
    for _ in range(4):
        now += 1.0
        store.set_message_age(0.1)
        store.apply(one for one in run.step(10) if isinstance(one, Summary))
        bottlenecks.data_bound(store)
        diagnosis(store)
    assert len(made) == 1
    store.apply([next(one for one in run.step(11) if isinstance(one, Step))])
    diagnosis(store)
    assert len(made) == 2


def test_medians_are_those_of_the_newest_record_of_each_rank() -> None:
    store = Store(lambda: 100.0)
    store.apply(FakeRun(oversubscribed=False).story(10))
    records = store.state.steps.values()
    found = bottlenecks.medians(store)
    assert found.step_ms == statistics.median_high(record.step_ms for record in records)
    assert found.waited_ms == statistics.median_high(record.waited_ms for record in records) > 0
    for name, ms in found.phases.items():
        assert ms == statistics.median_high(record.phases[name] for record in records)
