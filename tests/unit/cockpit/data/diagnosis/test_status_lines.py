"""Tests of the one to five lines that describe a run in a status bar, such as that of tmux."""

import math

from msgspec import structs
from prometheus_client import generate_latest

from agents.protocol import Step, Summary
from cockpit.data import plain
from cockpit.data.diagnosis.diagnosis import Level, diagnosis
from cockpit.data.diagnosis.status_lines import MOST_LINES, sparkline, status_lines
from cockpit.data.store import Store
from cockpit.export.prometheus import RunCollector
from tests.screens.fake_run import FakeRun


def stored(run: FakeRun, rank_records: bool = True) -> Store:
    store = Store(lambda: 100.0)
    store.rank_records = rank_records
    store.apply(update for update in run.story(40) if rank_records or not isinstance(update, Step))
    store.set_message_age(0.1)
    return store


def test_lines_from_most_to_least_important() -> None:
    store = stored(FakeRun(oversubscribed=False, slow_rank=None))
    lines = status_lines(store, MOST_LINES, 200)
    assert [level for level, _ in lines[:2]] == [Level.WARN, Level.WARN]
    state, judgement, curves, traffic, newest = (text for _, text in lines)
    assert state.startswith("! LIVE · BUBBLE-BOUND · demo · 40/300 steps") and "8/8 ranks" in state
    assert judgement == f"! {diagnosis(store).sentence}"
    assert curves.startswith("loss █") and "last 24 steps" in curves
    assert traffic.startswith("exposed ms: tp") and "bubble" in traffic
    assert newest.split(" · ")[-1]
    assert status_lines(store, 2, 200) == lines[:2]


def test_the_number_of_steps_belongs_to_the_values_beside_it() -> None:
    """The ranks' records of a step arrive before the summary of that step over all ranks, which contains the loss."""
    run = FakeRun()
    store = stored(run)
    store.apply(update for update in run.step(40) if isinstance(update, Step))
    assert store.step == 40 and store.summary and store.summary.step == 39
    assert "40/300 steps" in status_lines(store, 1, 200)[0][1]


def test_the_validation_loss_stays_until_the_next_one() -> None:
    run = FakeRun()
    store = Store(lambda: 100.0)
    for update in run.story(40):
        if isinstance(update, Summary):
            update = structs.replace(update, validation_loss=2.5 if update.step == 30 else None)
        store.apply([update])
    assert "validation 2.500 at step 30" in status_lines(store, 3, 200)[2][1]
    assert plain.validation(store) == {"step": 30, "loss": 2.5}
    exported = generate_latest(RunCollector(lambda: store)).decode()  # type: ignore[arg-type]
    assert 'cockpit_validation_loss{run="' in exported and "} 2.5\n" in exported
    assert "validation" not in status_lines(stored(FakeRun()), 3, 200)[2][1]
    assert plain.validation(stored(FakeRun())) is None


def test_lines_are_cut_to_the_width() -> None:
    store = stored(FakeRun())
    for width in (1, 20, 60):
        assert all(len(text) <= max(width, 60) for _, text in status_lines(store, MOST_LINES, width))
    assert status_lines(store, 2, 40)[1][1].endswith("…")


def test_before_the_first_rank() -> None:
    lines = status_lines(Store(lambda: 0.0), MOST_LINES, 80)
    assert [text for _, text in lines][2:] == ["· no step yet", "· no traffic reported", "· no events yet"]


def test_without_records_of_ranks_no_rank_is_called_silent() -> None:
    store = stored(FakeRun(oversubscribed=False, slow_rank=None), rank_records=False)
    (_, state), (_, judgement) = status_lines(store, 2, 200)
    assert "8/8 ranks joined" in state and "no step is done yet" not in judgement


def test_a_sparkline_marks_missing_values() -> None:
    assert sparkline([1.0, None, 2.0, math.nan]) == "▁·█·"
    assert sparkline([3.0, 3.0]) == "▁▁" and sparkline([None]) == "·"
