"""Tests of the marks of events on the curves: their step, their kind, and the change of a metric at that step."""

import math
from collections.abc import Iterator

from agents.protocol import ALERT, CHECKPOINT_STEP, RESUMED, Event, Update
from cockpit.data.curves.job_metrics import BY_KEY
from cockpit.data.curves.segments import Segment, segments
from cockpit.data.navigation.event_marks import CHANGE, around, curve_marks, glyph_of
from cockpit.data.store import Store
from tests.screens.fake_run import START_S, FakeRun


def story(run: FakeRun) -> Iterator[Update]:
    yield from run.story(160, change_at=100)
    yield Event(START_S + 9, "info", "engine", "checkpoint", {CHECKPOINT_STEP: 21})
    yield Event(START_S + 30, "info", "engine", "resumed", {CHECKPOINT_STEP: 61, RESUMED: True})
    facts = {ALERT: "loss_spike", "subject": "run", "active": True, "step": 70}
    yield Event(START_S + 35, "error", "hub", "loss [red]\x1b[31m 9", facts)
    yield Event(START_S + 36, "info", "hub", "over: loss", {**facts, "active": False, "step": 75})
    yield Event(START_S + 36, "info", "hub", "a rank joined")


def test_marks_are_the_changes_alerts_resumes_and_checkpoints_by_step() -> None:
    store = Store()
    store.apply(story(FakeRun()))
    found = [(mark.step, mark.kind.word, glyph_of(mark)) for mark in curve_marks(store, [(5, "mine")])]
    assert found == [
        (5, "mark", "⚑"),
        (20, "saved", "◇"),
        (61, "resumed", "↺"),
        (70, "alert", "✗"),
        (75, "over", "✓"),
        (100, "change", "◆"),
    ]
    assert all(mark.text.isprintable() for mark in curve_marks(store))
    change = next(mark for mark in curve_marks(store) if mark.kind is CHANGE)
    assert change.text.startswith("micro_batches 4→8 · ada@login")


def test_what_happened_around_a_mark() -> None:
    store = Store()
    store.apply(story(FakeRun()))
    step_ms = BY_KEY["step_ms"]
    found = segments(store.state, "step_ms")
    assert around(found, step_ms, 100).startswith("41") and "→ 65" in around(found, step_ms, 100)
    assert "(+5" in around(found, step_ms, 100) and around(found, step_ms, 159) == ""
    bubble = around(
        [Segment([(step, 0.2 + step / 1000) for step in range(0, 640, 8)], width=32)], BY_KEY["bubble"], 320
    )
    assert bubble.startswith("~") and bubble.endswith("%)"), "from buckets, so it is rough"
    broken = [Segment([(step, math.nan if step == 330 else 2.0) for step in range(300, 340)])]
    assert around(broken, BY_KEY["loss"], 320).startswith("2.000 → NaN"), "a median would hide it"
