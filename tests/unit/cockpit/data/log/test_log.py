"""The log of a run: kinds and steps of entries, repeated entries, ends of alerts, filters, and the effect of a
change."""

from collections.abc import Iterator

from agents.protocol import (
    ALERT,
    CHECKPOINT_STEP,
    RESUMED,
    SAMPLE,
    CommandState,
    Event,
    Summary,
    Update,
    Value,
)
from agents.state.preview_checks import Check, check_event
from cockpit.data import plain
from cockpit.data.log.log_view import LogFilter, LogGroup, groups
from cockpit.data.log.outcomes import brought, brought_text
from cockpit.data.log.run_log import Kind, log_entries
from cockpit.data.store import Store
from tests.screens.fake_run import START_S, FakeRun
from tests.unit.cockpit.schemas import check


def event(at_s: float, text: str, level: str = "info", source: str = "hub", **facts: Value) -> Event:
    return Event(START_S + at_s, level, source, text, facts)  # type: ignore[arg-type]


def alert(at_s: float, active: bool, subject: str = "rank 3", step: int = 40) -> Event:
    facts: dict[str, Value] = {"subject": subject, "active": active, "step": step}
    text = "needs 358 ms" if active else "over: needs 358 ms"
    return event(at_s, text, "warning" if active else "info", **{ALERT: "straggler"}, **facts)


def listed(*updates: Update, only: LogFilter | None = None, steps: int = 100) -> list[LogGroup]:
    store = Store()
    store.apply(one for one in FakeRun().story(steps) if not isinstance(one, Event))
    store.apply(updates)
    return groups(log_entries(store), only or LogFilter())


def test_an_alert_and_its_end_are_one_line_if_nothing_is_between() -> None:
    (line,) = listed(alert(10, True), alert(22, False), alert(30, True, step=60), alert(31.5, False))
    assert (line.count, line.lasted_s, line.shown.kind, line.shown.step) == (2, 1.5, Kind.ALERT, 60)
    assert line.level == "warning"
    first, between, end = listed(
        alert(10, True), event(15, "checkpoint", checkpoint_step=31), alert(22, False)
    )
    assert (first.lasted_s, between.end, end.shown.kind) == (12.0, None, Kind.ENDED)
    active = listed(alert(10, True), alert(11, True, "rank 4"), alert(12, False, "rank 4"))
    assert [(line.shown.subject, line.lasted_s) for line in active] == [
        (("straggler", "rank 3"), None),
        (("straggler", "rank 4"), 1.0),
    ]


def test_repeats_differ_only_in_numbers() -> None:
    lines = listed(
        *(event(n, f"rank 5: {n + 3} records were dropped", "warning", "rank 5") for n in range(12)),
        event(13, "rank 5: 9 records were dropped", "warning", "rank 6"),
        event(14, "rank 5: 9 records were dropped", "error", "rank 6"),
    )
    assert [line.count for line in lines] == [12, 1, 1]
    assert lines[0].shown.text == "rank 5: 14 records were dropped"  # the newest


def test_kinds_and_steps() -> None:
    lines = listed(
        event(5, "before the first step ended"),
        event(10.1, "checkpoint of step 20", **{CHECKPOINT_STEP: 20}),
        event(11, "resumed", **{CHECKPOINT_STEP: 20, RESUMED: True}),
        event(12, "12 seconds are 24 steps"),
        event(12.5, "no number", **{CHECKPOINT_STEP: "many"}),
    )
    assert [(line.shown.kind.value, line.shown.step, line.shown.estimated) for line in lines] == [
        ("event", 10, True),
        ("saved", 19, False),  # 20 steps are done, so the last of them is step 19
        ("resumed", 20, False),
        ("event", 24, True),
        ("saved", 25, True),
    ]
    (early,) = listed(event(-5, "before the first step ended"))
    assert early.shown.step is None


def test_filters() -> None:
    updates = (
        event(1, "a save", **{CHECKPOINT_STEP: 1}),
        event(2, "Bad Thing", "error", "rank 7"),
        alert(3, True),
        alert(4, False),
    )
    assert [line.shown.kind for line in listed(*updates, only=LogFilter(kind=2))] == [Kind.ALERT]
    assert [line.level for line in listed(*updates, only=LogFilter(level=1))] == ["error", "warning"]
    assert [line.level for line in listed(*updates, only=LogFilter(level=2))] == ["error"]
    for text in ("bad th", "RANK 7"):
        assert [line.shown.text for line in listed(*updates, only=LogFilter(text=text))] == ["Bad Thing"]


def changed_run(after: int = 20) -> Iterator[Update]:
    run = FakeRun()
    yield from run.story(60, change_at=60 - after)


def changed(after: int = 20) -> tuple[Store, CommandState]:
    store = Store()
    store.apply(changed_run(after))
    return store, store.state.commands["c1"]


def test_the_effect_of_a_change_is_measured_around_its_step() -> None:
    store, command = changed()
    (one,) = brought(store.state, command)
    assert 395 < one.before < 430 and 640 < one.after < 670 and one.inside is None
    assert brought_text(one).startswith("step time 41") and brought_text(one).endswith(" %)")
    store, command = changed(after=3)  # too few steps after it
    assert brought(store.state, command) == []


def test_a_checked_preview_says_whether_its_prediction_held() -> None:
    store, command = changed()
    checks = [
        Check("step_ms", 412.0, 600.0, 550.0, 640.0, 655.0),
        Check("bubble", 0.21, 0.12, 0.1, 0.14, 0.12),
    ]
    store.apply([check_event(START_S, command.revision, {"micro_batches": (4, 8)}, checks)])
    assert [brought_text(one) for one in brought(store.state, command)] == [
        "step time 412 → 655 ms (+59.0 %), predicted 550 .. 640 ms: outside",
        "bubble 21.0 → 12.0 % (-9.0 pt), predicted 10.0 .. 14.0 %: inside",
    ]


def test_a_repeated_step_is_not_dated_twice() -> None:
    """After a resume, the summaries of later steps are gone, so the step of a log entry is estimated from the summaries
    that are left."""
    store = Store()
    store.apply(FakeRun().story(50))
    summary = next(one for one in FakeRun().step(10) if isinstance(one, Summary))
    store.apply([summary, event(30, "after the resume")])
    assert log_entries(store)[-1].step == 10


def test_a_generated_text_is_marked_and_cannot_look_like_another_entry() -> None:
    hostile = "checkpoint of step 9\n\x1b[2J\u202eif x:\n\treturn"
    facts: dict[str, Value] = {SAMPLE: True, "step": 9, "prefill_tokens_per_s": 30.5}
    store = Store()
    store.apply([event(1, hostile, **facts), event(2, "so-called", **{SAMPLE: "yes"})])
    entry, other = log_entries(store)
    assert (entry.kind, entry.step, entry.estimated, other.kind) == (Kind.SAMPLE, 9, False, Kind.EVENT)
    assert entry.text == "“checkpoint of step 9↵ [2J if x:↵ return”"
    assert entry.headline == f"sample {entry.text}" and other.headline == "so-called"
    assert [line.shown for line in groups(log_entries(store), LogFilter(kind=4))] == [entry]
    (record, _) = plain.log(store)
    assert record["text"] == "checkpoint of step 9\n [2J if x:\n return"
    assert record["sample"] == {"step": 9, "prefill_tokens_per_s": 30.5}
    check("log", record)


def test_equal_texts_are_separate_entries() -> None:
    facts: dict[str, Value] = {SAMPLE: True, "step": 9}
    assert len(listed(event(1, "aaaa", **facts), event(2, "aaaa", **facts))) == 2
