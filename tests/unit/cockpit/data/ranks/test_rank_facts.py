"""Why a rank is slow: the sentence in the inspector, and the numbers of the rank and of its peers."""

import pytest
from msgspec import structs

from agents.protocol import Alert, Gone, Step, Vitals
from cockpit.data.diagnosis.statement import Level
from cockpit.data.ranks.rank_facts import alerts_of, facts, why
from cockpit.data.store import Store
from tests.screens.fake_run import FakeRun


def store_of(run: FakeRun, *more: Vitals) -> Store:
    store = Store()
    store.apply(run.story(12))
    store.apply(more)
    return store


def large(**fields: object) -> FakeRun:
    return FakeRun(dp=8, tp=4, oversubscribed=False, **fields)  # type: ignore[arg-type]


def test_a_slow_rank_is_explained_by_its_phases_and_by_its_waiting() -> None:
    found = why(store_of(large()), 3)
    assert found.level is Level.WARN
    assert found.sentence.startswith("slow: own time 323 ms, +41 %")
    assert "31 peers of pp0 have 229 ms" in found.sentence
    assert "backward +86 ms · forward +47 ms" in found.sentence
    assert "waits 86 ms, its peers 182" in found.sentence


def test_a_rank_like_its_peers_is_good() -> None:
    found = why(store_of(large()), 5)
    assert found.level is Level.GOOD and "slow" not in found.sentence and "waits" not in found.sentence


def test_throttling_and_a_low_clock_are_causes() -> None:
    signs = [
        Vitals(rank, 11, sm_mhz=1980, power_w=500.0, power_limit_w=700.0, throttle=[]) for rank in range(32)
    ]
    signs[3] = Vitals(3, 11, sm_mhz=1188, power_w=695.0, power_limit_w=700.0, throttle=["thermal"])
    found = why(store_of(large(), *signs), 3)
    for part in ("throttled by thermal", "SM clock 1188 MHz, -40 %", "at its power limit of 700 W"):
        assert part in found.parts
    other = why(store_of(large(), *signs), 4)
    assert len(other.parts) == 2


def test_a_slow_node_is_named() -> None:
    run = large(slow_rank=None, node_ranks=4)
    store = Store()
    store.apply(run.begin())
    for step in range(12):
        for update in run.step(step):
            if isinstance(update, Step) and run.coords(update.rank)["dp"] == 2 and update.rank < 32:
                comm = {axis: structs.replace(one, exposed_ms=0.0) for axis, one in update.comm.items()}
                update = structs.replace(update, comm=comm)
            store.apply([update])
    assert "4 of 4 ranks of node2 are slow" in why(store, 9).parts
    assert not any("node" in part for part in why(store, 3).parts)


def test_a_rank_without_peers_is_not_judged() -> None:
    store = store_of(FakeRun(pp=2, dp=1, tp=1, ep=1, oversubscribed=False))
    found = why(store, 0)
    assert found.level is Level.NOTE and "no other rank has the same work" in found.sentence
    assert facts(store, 0)["own"].peers is None


def test_on_shared_cores_a_small_difference_is_no_warning() -> None:
    found = why(store_of(FakeRun(dp=8, tp=4, oversubscribed=True)), 3)
    assert found.level is Level.NOTE and "slow" not in found.sentence and "forward +" in found.sentence


def test_a_lost_rank_shows_the_reason() -> None:
    store = store_of(large())
    store.apply([Gone(3, clean=False, text="killed by signal 9", process="ended")])
    found = why(store, 3)
    assert found.level is Level.BAD and found.sentence == "lost · killed by signal 9"
    assert facts(store, 4)["own"].peers == pytest.approx(facts(store, 5)["own"].peers or 0.0)


def test_a_kept_step_has_its_own_numbers() -> None:
    store = store_of(large())
    value = store.rank_history.value("phase:forward", 2, 3)
    assert facts(store, 3, at=2)["phase:forward"].value == value
    assert facts(store, 3, at=999) == {}


def test_alerts_that_name_the_rank_come_by_severity() -> None:
    store = store_of(large())
    store.apply([Alert("straggler", "rank 3", "warning", True, 9, 0.0, "slow", {}, [3])])
    store.apply([Alert("stall", "run", "error", True, 9, 0.0, "stands", {}, [3, 4])])
    assert [alert.name for alert in alerts_of(store, 3)] == ["stall", "straggler"]
    assert [alert.name for alert in alerts_of(store, 4)] == ["stall"]
