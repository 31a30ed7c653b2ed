"""The rank history: what it keeps, its size limits, resumed runs, and the values, deviations and rank-by-step rows that
the cockpit computes from it."""

import math
from collections.abc import Iterator

import pytest
from msgspec import structs

from agents.protocol import Hello, Step, Traffic, Update, Vitals
from cockpit.data.history import ranks as history_of_ranks
from cockpit.data.history.metric_table import OWN_TIME, STEP_TIME
from cockpit.data.metrics import Against, read
from cockpit.data.ranks.rank_steps import RowHistory, fold
from cockpit.data.store import Store
from tests.screens.fake_run import FakeRun
from tests.unit.agents.fleet import make_hello, make_step

WORLD = 16


def played(own_ms: dict[tuple[int, int], float], steps: int, world: int = WORLD) -> Store:
    """A store with `steps` steps of 100 ms. A rank's own time in a step (without the waiting for other ranks) is
    `own_ms[rank, step]`, or 50 ms if the dict has no such entry."""
    store = Store()
    store.apply(make_hello(rank, world) for rank in range(world))
    store.apply(
        record(rank, step, own_ms.get((rank, step), 50.0)) for step in range(steps) for rank in range(world)
    )
    return store


def record(rank: int, step: int, own_ms: float) -> Step:
    waits = 100.0 - own_ms
    return structs.replace(make_step(rank, step), step_ms=100.0, comm={"dp": Traffic(8, waits, waits)})


def test_the_history_keeps_values_by_metric_step_and_rank() -> None:
    store = played({(3, 5): 80.0}, 8)
    store.apply([Vitals(2, 6, temperature_c=70.0)])
    history = store.rank_history
    assert history.value("own", 5, 3) == 80.0 and history.value("own", 4, 3) == 50.0
    assert history.value("temperature", 6, 2) == 70.0 and history.value("temperature", 6, 1) is None
    assert history.value("own", 99, 3) is None and history.value("own", 5, 99) is None
    assert history.steps("own") == list(range(8)) and history.steps("temperature") == [6]
    assert history.series("own", 3)[4:6] == [(4, 50.0), (5, 80.0)]
    assert "mfu" not in history.metrics(), "no rank reports it"


def test_the_memory_is_bounded_in_values_and_in_names_of_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = len(played({}, 1).rank_history.metrics())
    monkeypatch.setattr(history_of_ranks, "MOST_VALUES", 20 * WORLD * metrics)
    store = played({}, 64)
    assert store.rank_history.steps("own") == list(range(44, 64))
    odd = {f"phase {number}": 1.0 for number in range(64)}
    store.apply([structs.replace(make_step(0, 64), phases=odd)])
    assert len(store.rank_history.phases) == history_of_ranks.MOST_PHASES
    most = history_of_ranks.RankHistory()
    most.ranks, most._keys = list(range(16384)), dict.fromkeys(map(str, range(16)))
    assert history_of_ranks.LEAST_STEPS <= most.capacity <= 12 * 2**20 // (16384 * metrics)


def test_a_resume_cuts_later_steps_and_a_late_rank_does_not() -> None:
    store = played({}, 10)
    store.apply([record(1, 11, 50.0)])
    assert store.rank_history.steps("own")[-2:] == [9, 11]
    store.apply([record(2, 10, 60.0)])  # rank 2 is behind rank 1: not a resume
    assert store.rank_history.steps("own")[-3:] == [9, 10, 11]
    store.apply([record(0, 4, 70.0), record(1, 4, 71.0)])
    assert store.rank_history.steps("own") == [0, 1, 2, 3, 4]
    assert [store.rank_history.value("own", 4, rank) for rank in range(3)] == [70.0, 71.0, None]


def test_a_frozen_store_keeps_its_history() -> None:
    store = played({}, 4)
    still = store.frozen()
    store.apply(record(rank, step, 90.0) for step in (3, 4) for rank in range(WORLD))
    assert still.rank_history.steps("own") == [0, 1, 2, 3] and still.rank_history.value("own", 3, 0) == 50.0


def test_ranks_of_another_run_begin_anew() -> None:
    store = played({}, 4)
    small: list[Update] = [make_hello(rank, 2) for rank in range(2)]
    store.rebuild([*small, record(0, 50, 30.0), record(1, 50, 30.0)])
    assert store.rank_history.ranks == [0, 1] and store.rank_history.steps("own") == [50]


def test_a_rank_that_joins_late_has_no_earlier_values() -> None:
    store = Store()
    store.apply(
        [make_hello(0, 2), record(0, 0, 50.0), make_hello(1, 2), record(0, 1, 50.0), record(1, 1, 60.0)]
    )
    assert store.rank_history.value("own", 0, 1) is None and store.rank_history.value("own", 1, 1) == 60.0
    assert read(store, OWN_TIME, at=0)[1].value is None


def test_a_kept_step_can_be_read_and_another_one_has_no_values() -> None:
    store = played({(3, 5): 90.0}, 20)
    at_five = read(store, OWN_TIME, at=5)
    assert at_five[3].value == 90.0 and at_five[3].deviation == pytest.approx(0.8)
    assert read(store, OWN_TIME)[3].deviation == 0.0
    assert read(store, OWN_TIME, at=500)[3].value is None


def test_against_its_own_earlier_steps_a_slowdown_of_all_ranks_shows() -> None:
    late = {(rank, step): 80.0 for rank in range(WORLD) for step in range(32, 40)}
    store = played(late, 40)
    assert all(one.deviation == 0.0 for one in read(store, OWN_TIME).values())
    own = read(store, OWN_TIME, Against.OWN)
    assert all(one.deviation == pytest.approx(0.6) for one in own.values())
    assert read(played({}, 9), OWN_TIME, Against.OWN)[0].deviation == 0.0, "too few steps for a baseline"


def test_a_step_that_only_some_ranks_reported_is_not_compared_as_zero() -> None:
    store = played({}, 12)
    store.apply(record(rank, 12, 90.0) for rank in range(4))
    readings = read(store, OWN_TIME)
    assert all(one.value == 50.0 and one.deviation == 0.0 for one in readings.values())
    assert math.isnan(_rows(store, 12, RowHistory())[15])


# ---------------------------------------------------------------------------------------- rank x step


def _rows(store: Store, step: int, rows: RowHistory) -> list[float]:
    each = tuple((rank,) for rank in range(WORLD))
    return rows.values(store, OWN_TIME, Against.PEERS, each, [step])[step]


@pytest.mark.parametrize(
    ("slow", "what"),
    [
        ({(5, step) for step in range(16)}, "a slow rank"),
        ({(step, step) for step in range(16)}, "rotating skew"),
    ],
)
def test_a_slow_rank_and_rotating_skew_have_different_shapes(slow: set[tuple[int, int]], what: str) -> None:
    store = played(dict.fromkeys(slow, 90.0), 16)
    rows = RowHistory()
    marked = {
        (rank, step) for step in range(16) for rank, by in enumerate(_rows(store, step, rows)) if by > 0.5
    }
    assert marked == slow, what


def test_one_slow_step_shows_against_the_own_earlier_steps() -> None:
    store = played({(rank, 20): 90.0 for rank in range(WORLD)}, 40)
    each = tuple((rank,) for rank in range(WORLD))
    found = RowHistory().values(store, OWN_TIME, Against.OWN, each, list(range(40)))
    assert {step for step, values in found.items() if min(values) > 0.5} == {20}


def test_a_row_of_several_ranks_shows_the_worst() -> None:
    store = played({(5, 3): 90.0, (6, 3): 10.0}, 4)
    rows = fold(range(WORLD), 2, 1)
    assert [len(row) for row in rows] == [8, 8]
    values = RowHistory().values(store, OWN_TIME, Against.PEERS, rows, [3])[3]
    assert values == [pytest.approx(0.8), 0.0]
    assert RowHistory().values(store, STEP_TIME, Against.NOTHING, rows, [3])[3] == [100.0, 100.0]


def test_rows_do_not_mix_bands_where_that_fits() -> None:
    assert {len(row) for row in fold(range(1024), 20, 128)} == {64}
    assert {len(row) for row in fold(range(1024), 9, 128)} == {128}
    assert {len(row) for row in fold(range(1024), 3, 128)} == {384, 256}
    assert fold(range(8), 20, 4) == tuple((rank,) for rank in range(8))
    for count, rows, band in ((7, 3, 7), (100, 9, 10), (16384, 30, 1024), (5, 1, 5)):
        found = fold(range(count), rows, band)
        assert len(found) <= rows and [rank for row in found for rank in row] == list(range(count))


def test_a_large_run_is_computed_in_parts_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cockpit.data.ranks.rank_steps.AT_ONCE", 4 * WORLD)
    store, rows = played({}, 10), RowHistory()
    each = tuple((rank,) for rank in range(WORLD))
    seen = [sorted(rows.values(store, OWN_TIME, Against.PEERS, each, list(range(10)))) for _ in range(3)]
    assert seen[0] == list(range(4, 10)) and not set(seen[0]) - set(seen[1])
    assert seen[-1] == list(range(10)) and rows.complete


def test_the_size_does_not_depend_on_the_world_of_a_hello() -> None:
    """The size of the history depends on the number of ranks that send records, not on the world size that a rank's
    hello message states."""
    store = Store()
    huge: Hello = structs.replace(make_hello(0, 2), world=2**24)
    store.apply([huge, *stories(1)])
    assert len(store.rank_history.column("step", 0)) <= 8


def stories(steps: int) -> Iterator[Update]:
    run = FakeRun()
    for step in range(steps):
        yield from run.step(step)


def test_the_newest_step_is_computed_again_when_more_ranks_report_it() -> None:
    store, rows = played({}, 12), RowHistory()
    store.apply(record(rank, 12, 50.0) for rank in range(4))
    assert math.isnan(_rows(store, 12, rows)[5])
    store.apply(record(rank, 12, 90.0 if rank == 5 else 50.0) for rank in range(4, WORLD))
    assert _rows(store, 12, rows)[5] == pytest.approx(0.8)
