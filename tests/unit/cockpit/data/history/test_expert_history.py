"""The history of the expert load: its size is bounded, it keeps the lowest and the highest loads, and it finds in the
received records at which step an expert became dead or hot."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.protocol import Experts, ExpertShare, LayerLoad, Loads, LoadSummary
from agents.protocol.held_experts import HELD, held_facts, held_texts, read_held
from cockpit.data.experts import owners, shown, since_text, unwell
from cockpit.data.history.experts import ExpertHistory, Health
from cockpit.data.history.frames import FEWEST_FRAMES, Frames
from cockpit.data.store import Store
from tests.screens.fake_run import FakeRun
from tests.unit.agents.fleet import make_hello


def record(step: int, *dead: int, layer: int = 0, experts: int = 8, hot: int | None = None) -> Experts:
    load = [0 if expert in dead else 100 for expert in range(experts)]
    if hot is not None:
        load[hot] = 10_000
    return Experts(step, [LayerLoad(layer, load, 0)])


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.floats(0, 4, width=16), min_size=3, max_size=3), min_size=1, max_size=80),
    st.integers(20, 90),
)
def test_frames_are_bounded_and_keep_every_extreme(records: list[list[float]], most: int) -> None:
    frames = Frames(most)
    for step, row in enumerate(records):
        frames.add(step, {7: row})
    assert len(frames) <= max(FEWEST_FRAMES, 2 * most // 9)
    assert frames[len(frames) - 1].records == 1 and frames[len(frames) - 1].last == len(records) - 1
    kept = [frames[number] for number in range(len(frames))]
    assert sum(frame.records for frame in kept) == len(records)
    for frame in kept:
        those = records[frame.first : frame.last + 1]
        assert list(frame.low) == [min(column) for column in zip(*those, strict=True)]
        assert list(frame.high) == [max(column) for column in zip(*those, strict=True)]


def test_a_layer_that_is_missing_in_a_record_is_not_zero() -> None:
    frames = Frames(1000)
    frames.add(0, {0: [1.0]})
    frames.add(1, {1: [2.0]})
    frames.add(2, {0: [3.0], 1: [4.0]})
    assert [(one.first, one.low) for one in frames.series(0, 0)] == [(0, 1.0), (2, 3.0)]
    assert [(one.first, one.low) for one in frames.series(1, 0)] == [(1, 2.0), (2, 4.0)]
    assert math.isnan(frames[0].low[1])
    frames.add(3, {0: [1.0, 2.0]})  # another model
    assert len(frames) == 1 and frames.layers == [0]


def test_a_streak_begins_with_the_first_record_and_names_the_one_before() -> None:
    history = ExpertHistory()
    for step in range(0, 60, 4):
        history.add_experts(record(step, *([5] if step >= 48 else [])))
    streak = history.streak(0, 5)
    assert streak and (streak.health, streak.first, streak.before) == (Health.DEAD, 48, 44)
    assert since_text(streak) == "since step 48, not yet at step 44"
    history.add_experts(record(60))
    assert history.streak(0, 5) is None
    # An older sample still has the streak as it was at that time.
    number = history.loads.find(50)
    assert number is not None
    earlier = history.streak(0, 5, number)
    assert earlier and (earlier.first, earlier.before) == (48, 44)


def test_a_streak_that_is_older_than_all_records_says_so() -> None:
    history = ExpertHistory()
    history.add_experts(record(400, 5))
    history.add_experts(record(420, 5))
    streak = history.streak(0, 5)
    assert streak and since_text(streak) == "since before step 400"


def test_a_streak_stays_exact_when_its_beginning_is_thinned() -> None:
    history = ExpertHistory()
    history.loads = Frames(8 * 6)
    for step in range(200):
        history.add_experts(record(step, *([3] if step >= 20 else [])))
    assert len(history.loads) < 10
    streak = history.streak(0, 3)
    assert streak and (streak.first, streak.before, streak.exact) == (20, 19, True)


@pytest.mark.parametrize("inside", [0, 1])
def test_a_streak_seen_only_in_thinned_records_says_between_which_steps_it_began(inside: int) -> None:
    """Which steps are thinned does not depend on the loads, so the test first finds these steps in a run with an even
    load."""

    def seen(onset: int) -> ExpertHistory:
        history = ExpertHistory()
        history.loads = Frames(8 * 12)
        for step in range(80):
            history.add_experts(record(step, *([3] if step >= onset else [])))
        return history

    even = seen(80).loads
    number = next(n for n in range(1, len(even)) if even[n - 1].records > 1 and even[n].records > 1)
    before, frame = even[number - 1], even[number]
    history = seen(frame.first + inside)
    streak = history.streak(0, 3, len(history.loads) - 2)
    assert streak is not None
    known = (frame.first, frame.last + 1, False) if inside else (before.last, frame.first, True)
    assert (streak.before, streak.first, streak.exact) == known


def test_a_resume_cuts_what_is_repeated() -> None:
    history = ExpertHistory()
    for step in range(0, 100, 10):
        history.add_experts(record(step, *([1] if step >= 30 else []), *([2] if step >= 70 else [])))
    history.add_experts(record(50, 1, 2))
    assert history.loads[len(history.loads) - 1].last == 50
    one, two = history.streak(0, 1), history.streak(0, 2)
    assert one and (one.first, one.before) == (30, 20)
    assert two and (two.first, two.before) == (50, 40)


def test_a_record_that_is_sent_again_changes_nothing_and_copies_are_independent() -> None:
    history = ExpertHistory()
    history.add_experts(record(0))
    history.add_experts(record(10, 4))
    copy = history.copy()
    history.add_experts(record(10, 4))
    history.add_experts(record(20))
    assert (len(copy.loads), len(history.loads)) == (2, 3)
    assert copy.streak(0, 4) and not history.streak(0, 4)


def test_summaries_alone_give_figures_and_no_load_of_an_expert() -> None:
    store = Store()
    top = [ExpertShare(3, 0.5)]
    store.apply([make_hello(0, 1), Loads(7, [LoadSummary(2, 100, 4.0, 1.5, 0.6, top, 3, 10)])])
    assert shown(store, None) is None
    figures = store.expert_history.figures
    assert figures.layers == [2] and list(figures[0].low) == pytest.approx([4.0, 1.5, 0.6, 0.1, 3.0])


def test_the_worst_come_first_and_the_selected_step_is_shown_where_it_is_kept() -> None:
    store = Store()
    store.apply([make_hello(0, 1), record(0), record(10, 6), record(20, 6, 2), record(30, 6, 2, hot=0)])
    at = shown(store, None)
    assert at and [one.cell for one in unwell(store, at)] == [(0, 6), (0, 2), (0, 0)]
    earlier = shown(store, 10)
    assert earlier and [one.cell for one in unwell(store, earlier)] == [(0, 6)]
    assert earlier.step_text() == "step 10"
    between = shown(store, 15)
    assert between and between.step_text() == "step 15 is not kept; sample of step 10"
    assert shown(store, None) == at


# --------------------------------------------------------------------------------------------------------- owners


@given(st.dictionaries(st.integers(0, 99), st.sets(st.integers(0, 999), max_size=80), max_size=12))
def test_held_experts_survive_their_text(experts: dict[int, set[int]]) -> None:
    facts = held_facts(experts)
    assert all(isinstance(text, str) and len(text) <= 256 for text in facts.values())
    held = read_held(held_texts(facts))
    for layer in range(100):
        for expert in (*experts.get(layer, ()), 5, 500):
            assert any(one.has(layer, expert) for one in held) == (expert in experts.get(layer, ()))


@pytest.mark.parametrize("text", ["", ":", "x:1", "1:", "1:2:3", "9" * 200, "1-:3", "\x1b[31m:1"])
def test_a_text_that_cannot_be_read_names_no_owner(text: str) -> None:
    assert not [one for one in read_held([text]) if one.has(1, 2)]


def test_the_owners_of_an_expert_are_the_ranks_that_report_it() -> None:
    store = Store()
    run = FakeRun()
    store.apply(run.begin())
    assert owners(store, (2, 5)).ranks == [6]  # the second stage, ep rank 2
    assert owners(store, (9, 5)).why == "owner unknown: no rank that has joined holds it"
    silent = Store()
    silent.apply([make_hello(0, 2), make_hello(1, 2, facts={HELD: 7})])
    assert owners(silent, (0, 0)).why.startswith("owner unknown: no rank reports")
