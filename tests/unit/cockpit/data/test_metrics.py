"""The metrics of the rank grid: which ones the user can choose, their values, and which ranks the grid marks as
outliers."""

import pytest
from msgspec import structs
from rich.style import Style

from agents.protocol import PAUSED, Alert, Gone, Pulse, Step, Traffic, Vitals
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.metrics import OWN_TIME, STEP_TIME, available, read
from cockpit.data.plain import ranks
from cockpit.data.ranks.rank_levels import levels_of
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import palette
from cockpit.tui.widgets.ranks.inspector import inspector
from tests.screens.fake_run import FakeRun

HOT = Vitals(1, 5, device_percent=97.0, device_memory_bytes=70 << 30, power_w=690.0, temperature_c=88.0)


def store_with(*vitals: Vitals) -> Store:
    store = Store()
    store.apply(FakeRun().story(3))
    store.apply(vitals)
    return store


def test_vital_signs_are_offered_if_any_rank_has_them() -> None:
    keys = {metric.key for metric in available(store_with())}
    assert not keys & {"device", "device_memory", "power", "temperature", "clock"}
    store = store_with(HOT)
    metrics = {metric.key: metric for metric in available(store)}
    assert {"device", "device_memory", "power", "temperature"} <= set(metrics) and "clock" not in metrics
    readings = read(store, metrics["temperature"])
    assert readings[1].value == 88.0 and readings[0].value is None  # missing data is not zero
    assert read(store, metrics["device_memory"])[1].value == 70.0


@pytest.mark.parametrize(("ms", "level"), [(21.0, Level.GOOD), (42.0, Level.GOOD), (70.0, Level.WARN)])
def test_a_phase_is_marked_only_if_it_matters_to_the_step(ms: float, level: Level) -> None:
    """A phase that takes 42 ms instead of 21 ms adds less than 5 % to a step of 430 ms, so it is not marked."""
    store, run = Store(), FakeRun(slow_rank=None, oversubscribed=False)
    store.apply(run.begin())
    for step in range(8):
        for update in run.step(step):
            if isinstance(update, Step):
                phases = update.phases | {"optimizer": ms if update.rank == 1 else 21.0}
                update = structs.replace(update, comm={}, step_ms=430.0, phases=phases)
            store.apply([update])
    phase = next(metric for metric in available(store) if metric.key == "phase:optimizer")
    assert levels_of(store, phase, read(store, phase))[1] is level


def test_a_lost_rank_has_no_number_to_compare() -> None:
    store = store_with()
    store.apply(
        [Gone(3, clean=False, text="no message since 12:00:00: process 7 has ended", process="ended")]
    )
    metric = available(store)[0]
    lines = inspector(store, metric, read(store, metric), 3, 160, palette("cockpit-dark"))
    text = [line.strip(160, Style(color="white")).text.strip() for line in lines]
    assert text[1].startswith("· no own time") and "against" not in text[1]
    assert text[2] == "✗ lost · no message since 12:00:00: process 7 has ended"


@pytest.mark.parametrize(
    ("operation", "shown"),
    [
        (PAUSED, "paused"),
        ("waiting for the snapshot", "waiting for the snapshot"),
        ("backward, micro-batch 2", "in backward, micro-batch 2"),
        ("", "in an unnamed operation"),
    ],
)
def test_the_inspector_shows_the_operation_of_a_rank(operation: str, shown: str) -> None:
    store = store_with()
    store.apply([Pulse(1, 5, operation, 2000.0)])
    metric = available(store)[0]
    doing = inspector(store, metric, read(store, metric), 1, 160, palette("cockpit-dark"))[-1]
    assert doing.strip(doing.width, Style()).text == f"{shown} for 2.0 s"


def test_the_inspector_and_scripts_show_vital_signs() -> None:
    store = store_with(Vitals(1, 5, temperature_c=88.0, throttle=["thermal"]))
    metric = available(store)[0]

    def text(rank: int) -> str:
        lines: list[StripLine] = inspector(
            store, metric, read(store, metric), rank, 160, palette("cockpit-dark")
        )
        return "\n".join(line.strip(line.width, Style()).text for line in lines)

    assert "88 °C" in text(1) and "throttled by thermal" in text(1)
    assert "°C" not in text(0) and "W" not in text(0)
    records = ranks(store)
    assert records[1]["vitals"]["temperature_c"] == 88.0 and records[1]["vitals"]["power_w"] is None
    assert records[0]["vitals"] is None


def pair(slow_ms: float, waits: bool = True) -> Store:
    """A run whose stages have two ranks each. Rank 3 works for `slow_ms` and all other ranks for 60 ms; each step takes
    100 ms."""
    store = Store()
    run = FakeRun(dp=1, ep=2, oversubscribed=False, slow_rank=None)
    store.apply(run.story(8))
    for step in range(8, 16):
        for record in list(store.state.steps.values()):
            exposed = 100.0 - (slow_ms if record.rank == 3 else 60.0)
            comm = {"dp": Traffic(0, exposed, exposed)} if waits else {}
            store.apply([structs.replace(record, step=step, step_ms=100.0, comm=comm)])
    return store


def test_own_time_shows_the_slow_rank_in_a_stage_of_two() -> None:
    store = pair(90.0)
    assert available(store)[0] is OWN_TIME
    readings = read(store, OWN_TIME)
    assert readings[3].deviation == pytest.approx(0.5) and readings[2].deviation == pytest.approx(-1 / 3)
    assert levels_of(store, OWN_TIME, readings) == dict.fromkeys(range(3), Level.GOOD) | {3: Level.WARN}


def test_waiting_least_is_not_shown_as_better() -> None:
    store = pair(90.0)
    metrics = {metric.key: metric for metric in available(store)}
    for key in ("exposed", "comm", "bubble", "phase:forward"):
        assert metrics[key].worse == 0, key
    assert (
        next(metric for metric in available(pair(90.0, waits=False)) if metric.key == "phase:forward").worse
        == 1
    )


def test_without_waiting_times_the_step_time_is_shown() -> None:
    store = pair(90.0, waits=False)
    assert available(store)[0] is STEP_TIME


def test_alerted_ranks_are_marked_in_every_metric() -> None:
    store = pair(60.0)
    store.apply([Alert("straggler", "rank 1", "warning", True, 9, 0.0, "rank 1 needs 90 ms", {}, [1])])
    for metric in available(store):
        assert levels_of(store, metric, read(store, metric))[1] is Level.WARN, metric.key


@pytest.mark.parametrize("width", [40, 52, 60, 75])
def test_the_inspector_cuts_no_number(width: int) -> None:
    store = store_with(Vitals(1, 5, temperature_c=88.0, device_percent=97.0))
    metric, colours = available(store)[0], palette("cockpit-dark")
    whole = [
        line.strip(line.width, Style()).text
        for line in inspector(store, metric, read(store, metric), 1, 200, colours)
    ]
    for line, full in zip(
        inspector(store, metric, read(store, metric), 1, width, colours), whole, strict=True
    ):
        text = line.strip(line.width, Style()).text
        assert len(text) <= width and full.startswith(text) and full[len(text) :][:2] in ("", " ·")


def test_sentences_of_the_planner_group_digits_as_the_screen_does() -> None:
    text = "gathers take 86 % of a step, 1,002 of 12,168 ms; 1,2345 stays"
    assert format.spaced(text) == "gathers take 86 % of a step, 1 002 of 12 168 ms; 1,2345 stays"


def test_a_number_stays_on_one_line_with_its_unit() -> None:
    text = "an own time of 6 ms a step, +51 % against the ranks"
    for width in range(12, 40):
        lines = format.wrapped(text, width)
        assert " ".join(lines) == text and not any(line.startswith(("ms", "%")) for line in lines)
    assert format.words("+51 % against 4 GiB/s") == ["+51 %", "against", "4 GiB/s"]
    assert format.wrapped("482 of 1 610 ms", 10) == ["482 of", "1 610 ms"]
    assert format.wrapped("80 96 120 160 192 480 960", 12) == ["80 96 120", "160 192 480", "960"], "a list"


def test_a_rounded_zero_has_no_minus_sign() -> None:
    assert (format.excess(-0.0004), format.excess(-0.0004, 1), format.excess(-0.004, 1)) == (
        "+0 %",
        "+0.0 %",
        "-0.4 %",
    )
