"""Tests of the list of a run's anomalies. For each anomaly, the list names the screen that shows it, and the rank,
expert or step to select on that screen. The tests check these names and the order of the list, and that no anomaly is
listed twice."""

from collections.abc import Iterator

from msgspec import structs

from agents.protocol import Alert, Gone, Summary, Update
from cockpit.data.navigation.anomalies import anomalies, next_anomaly
from cockpit.data.store import Store
from tests.screens.fake_run import FakeRun, big


def filled(run: FakeRun, steps: int = 12) -> Store:
    store = Store()
    store.apply(run.story(steps))
    return store


def quiet() -> FakeRun:
    return FakeRun(oversubscribed=False, slow_rank=None)


def alert(name: str, level: str = "warning", text: str = "x", **facts: object) -> Alert:
    ranks = facts.pop("ranks", [])
    return Alert(name, "run", level, True, 9, 0.0, text, facts, ranks)  # type: ignore[arg-type]


def test_a_healthy_run_has_none() -> None:
    assert anomalies(filled(quiet())) == []


def test_alerts_by_severity_open_the_screen_where_they_can_be_seen() -> None:
    store = filled(quiet())
    store.apply(
        [
            alert("loss_spike", step=7),
            alert("dead_experts", text="2 experts in 1 of 4 layers had ...: layer 2: experts 5, 6 of 8"),
            alert("throttle", ranks=[4, 5]),
            alert("lost", "error", ranks=[6]),
            alert("novel"),
        ]
    )
    found = [(one.screen, one.rank, one.layer, one.expert, one.step) for one in anomalies(store)]
    assert found == [
        ("ranks", 6, None, None, None),
        ("ranks", 4, None, None, None),
        ("curves", None, None, None, 7),
        ("experts", None, 2, 5, None),
        ("log", None, None, None, None),
    ]


def test_an_alert_never_selects_an_expert_that_the_run_does_not_have() -> None:
    store = filled(quiet())
    store.apply([alert("collapse", "error", text="the router of layer 77 collapses: expert 3")])
    (one,) = anomalies(store)
    assert (one.screen, one.layer, one.expert) == ("experts", None, None)


def test_outliers_of_the_metric_lost_ranks_and_the_filter() -> None:
    store = filled(FakeRun(oversubscribed=False))
    assert [(one.rank, one.screen) for one in anomalies(store)] == [(3, "ranks")]
    assert (
        "rank 3 (pp0 dp1 tp1" in anomalies(store)[0].text and "against its peers" in anomalies(store)[0].text
    )
    assert anomalies(store, "memory") == [], "another metric has other outliers"
    store.apply([Gone(5, clean=False, text="gone\x1b[2J", process="ended"), Gone(6, clean=True)])
    assert [one.rank for one in anomalies(store)] == [5, 3] and anomalies(store)[0].text.isprintable()
    assert [one.rank for one in anomalies(store, among={3})] == [3]
    store.apply([alert("straggler", ranks=[3])])
    assert [one.rank for one in anomalies(store)] == [3, 5], (
        "an alerted rank is not listed as an outlier again"
    )


def test_the_slowest_step_is_compared_with_steps_of_the_same_knobs() -> None:
    def with_slow(store: Store, step: int) -> Iterator[Update]:
        for update in FakeRun().step(step):
            if isinstance(update, Summary):
                yield structs.replace(update, step_ms=900.0, revision=store.state.summaries[-1].revision)

    store = filled(quiet(), 20)
    assert anomalies(store) == []
    store.apply(with_slow(store, 20))
    assert [(one.screen, one.step) for one in anomalies(store)] == [("pipeline", 20)]
    changed = Store()
    changed.apply(quiet().story(40, change_at=20))  # a knob changes the step time from 412 to 655 ms
    assert [one for one in anomalies(changed) if one.step is not None] == []


def test_next_goes_on_from_an_anomaly_whose_place_has_changed() -> None:
    store = filled(FakeRun(oversubscribed=False, straggler_alert=True))
    first = next_anomaly(anomalies(store), None, 1)
    assert first
    store.apply([alert("lost", "error", ranks=[6]), alert("novel")])
    found = anomalies(store)
    assert next_anomaly(found, first[1].key, 1) == (2, found[2])
    assert next_anomaly(found, first[1].key, -1) == (0, found[0])
    assert next_anomaly(found, ("gone",), -1) == (2, found[2])
    assert next_anomaly([], None, 1) is None


def test_many_outliers_are_listed_up_to_a_limit() -> None:
    store = filled(big(), 3)
    store.apply(Gone(rank, clean=False, text="", process="ended") for rank in range(500))
    assert 64 <= len(anomalies(store)) <= 3 * 64
