"""The step history: which steps it keeps, what it stores for each, and that a resumed run replaces repeated steps."""

import math
import random
import re
from itertools import pairwise

import pytest
from msgspec import structs

from agents.protocol import Action, Event, Hello, Step, Timeline, Traffic, Value
from cockpit.data.history import phases as phases_module
from cockpit.data.history.kept_steps import KeptSteps
from cockpit.data.history.metric_table import PHASE
from cockpit.data.history.rank_values import OWN, values_of
from cockpit.data.history.timelines import NEWEST, STEPS, Timelines
from cockpit.data.pipeline.pipelines import at, moment_text, pipelines
from cockpit.data.pipeline.step_comparison import compare, happened, verdict
from cockpit.data.store import Store
from cockpit.tui.drawing.theme import palette
from cockpit.tui.drawing.themes import DEFAULT
from cockpit.tui.session import Selection
from cockpit.tui.widgets.pipeline.phase_bars import PhaseBars
from tests.screens.fake_run import START_S, FakeRun

SPIKE, SPIKED = 84, 6


@pytest.fixture
def store() -> Store:
    store = Store()
    store.apply(FakeRun(spike=(SPIKE, SPIKED)).story(160, change_at=100))
    return store


def test_the_newest_the_slowest_and_an_even_selection_are_kept() -> None:
    times = dict.fromkeys(range(1000), 100.0) | {37: 900.0, 411: 800.0}
    kept: KeptSteps[int] = KeptSteps(lambda step: times[step], most=40, newest=10, slowest=2)
    for step in range(1000):
        kept.add(step, step)
    assert len(kept) == 40 and kept.dropped == 960
    assert {37, 411}.issubset(kept.steps) and kept.steps[-10:] == list(range(990, 1000))
    older = [step for step in kept.steps[:-10] if step not in (37, 411)]
    gaps = [b - a for a, b in pairwise(older)]
    assert max(gaps) <= 4 * min(gaps[1:-1])  # evenly spaced, up to the powers of two that thinning leaves


def test_the_budget_bounds_the_size_and_keeps_the_slowest() -> None:
    kept: KeptSteps[str] = KeptSteps(lambda step: float(step == 3), 100, newest=2, slowest=1, budget=50)
    for step in range(30):
        kept.add(step, "item", size=10)
    assert len(kept) == 5 and 3 in kept and {28, 29}.issubset(kept.steps)


def test_the_slowest_step_is_kept_and_explained(store: Store) -> None:
    assert store.phases.slowest() == SPIKE
    found = compare(store, SPIKE)
    assert found and found.phases.ranks == 8
    own = next(one for one in found.growths if one.quantity == OWN)
    assert (own.rank, own.stage, own.whole) == (SPIKED, 1, False)
    assert found.cause.startswith("rank 6 (pp1 dp1 tp0") and "backward +298 ms" in found.cause
    # Steps before the change of micro_batches are compared with each other only.
    assert found.usual.step_ms == pytest.approx(412, abs=15) and "usual 41" in verdict(found)


def test_when_every_rank_waits_no_rank_is_accused() -> None:
    store, run = Store(), FakeRun()
    store.apply(run.begin())
    for step in range(20):
        for update in run.step(step):
            if isinstance(update, Step) and step == 12:
                fields = {name: getattr(update, name) for name in Step.__struct_fields__}
                comm = update.comm | {"dp": Traffic(201_000, 414.0, 402.0)}
                update = Step(**fields | {"step_ms": update.step_ms + 400, "comm": comm})
            store.apply([update])
    found = compare(store, 12)
    assert found and found.cause.startswith("waiting in dp grew by 400 ms on all ranks · no rank was slow")


def test_an_ordinary_step_has_no_cause(store: Store) -> None:
    found = compare(store, 60)
    assert found and not found.cause and "nothing unusual" in verdict(found)


def test_what_happened_at_a_step(store: Store) -> None:
    facts: dict[str, Value] = {"alert": "nan", "subject": "run", "active": False, "step": 90}
    store.apply([Event(START_S, "info", "hub", "over: loss is nan", facts)])
    assert "over: loss is nan" in happened(store, 90)
    assert any(text.startswith("change: micro_batches 4→8 · applied 8/8") for text in happened(store, 100))
    assert not any("micro_batches" in text for text in happened(store, 90))


def test_a_resumed_run_replaces_the_steps_that_it_repeats(store: Store) -> None:
    run = FakeRun()
    for step in range(70, 76):
        store.apply(run.step(step))
    assert store.phases.steps[-1] == 73 and store.phases.get(SPIKE) is None
    assert store.timelines.steps[-1] == 72 and store.timelines.at(SPIKE) == {}
    assert store.phases.slowest() != SPIKE


def test_a_frozen_store_keeps_its_steps(store: Store) -> None:
    frozen, run = store.frozen(), FakeRun()
    for step in range(160, 300):
        store.apply(run.step(step))
    assert frozen.phases.steps[-1] == 157 and frozen.timelines.steps[-1] == 156
    assert store.phases.steps[-1] == 297
    assert frozen.timelines.at(156)[0].step == 156


def test_memory_is_bounded_with_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases_module, "EVERY_RANKS", 64)
    store, ranks, noise = Store(), 128, random.Random(5)
    for rank in range(ranks):
        store.state.apply(Hello(1, "r", rank, ranks, {"dp": rank}, "h", 1, "cpu", "d", 0, 0, rank == 0))
    for step in range(200):
        ms = 900.0 if step == 101 else 100.0 + noise.random()
        store.apply(
            Step(rank, step, step, 0, ms, {"forward": 40.0, "data": ms - 60}, 1, {}) for rank in range(ranks)
        )
    assert len(store.phases.steps) < 140 and store.phases.thinned
    assert store.phases.slowest() == 101  # a slow step is included although other steps are left out
    found = compare(store, 101)
    assert found and found.cause in (f"data took {ms} ms longer on all ranks" for ms in (799, 800))
    kept = store.phases.get(101)
    assert kept and kept.spread(PHASE + "data", 0).median == pytest.approx(840)


def test_timelines_are_bounded_and_read_back_unchanged() -> None:
    kept = Timelines(lambda step: 500.0 if step == 30 else 1.0)
    actions = [Action("F", 0, 0.0, 1.25, 1), Action("B", 0, 2.5, 4.125, 1)]
    for step in range(300):
        kept.note(Timeline(2, step, 9.5, actions))
    assert len(kept.steps) == STEPS and 30 in kept.steps and kept.steps[-NEWEST:] == list(range(276, 300))
    assert kept.at(30) == {2: Timeline(2, 30, 9.5, actions)}
    assert kept.at(31) == {} and kept.at(None) == {}


def test_the_cursor_names_actions_and_gaps(store: Store) -> None:
    (pipeline,) = pipelines(store, SPIKE)
    first, second = pipeline.lanes
    slow = next(action for action in first.actions if (action.kind, action.micro_batch) == ("B", 1))
    text = moment_text(pipeline, first, (slow.start_ms + slow.end_ms) / 2)
    assert text.startswith("pp0 · B1 of stage 0") and "· 342.7 ms (" in text and "+703 %" in text
    gap = at(second, 1.0)
    assert gap.action is None and gap.following and gap.following.kind == "F"
    assert "then F0, whose input F0 of stage 0 ended at 21.3 ms" in moment_text(pipeline, second, 1.0)


def test_of_two_ranks_each_is_compared_with_the_other() -> None:
    """If the higher of two values counted as their median, the slow rank would be compared with itself."""
    store, run = Store(), FakeRun(pp=1, dp=2, tp=1, spike=(80, 1))
    store.apply(run.story(120))
    spread = store.phases.get(80)
    assert spread is not None
    own = spread.spread(OWN, 0)
    assert own.rank == 1 and own.worst - own.median > 250
    selection = Selection(rank=1)
    lines = PhaseBars(selection).draw(store, 80, "", 120, 20, palette(DEFAULT))
    text = "\n".join(line.strip(120, palette(DEFAULT).text).text for line in lines)
    assert re.search(r"r0 .* -\d\d % .*\n.*r1 .* \+\d\d\d? %!", text)
    assert re.search(r"(?s)backward \d+ ms \(\+\d\d\d? %\).*against the other rank", text)


def test_own_time_is_that_of_each_record_whatever_axes_ranks_report() -> None:
    records = [one for one in FakeRun().step(3) if isinstance(one, Step)]
    axis = next(iter(records[0].comm))
    fewer = {name: one for name, one in records[1].comm.items() if name != axis}
    for change in ({}, {1: fewer}, {1: {}}):
        some = [
            structs.replace(one, comm=change[at]) if at in change else one for at, one in enumerate(records)
        ]
        values = values_of(some).values[OWN]
        assert list(values) == pytest.approx(
            [one.own_ms if one.comm else math.nan for one in some], nan_ok=True
        )
