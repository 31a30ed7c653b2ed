"""What the grid offers: vital signs where there are any, and nothing where there are none."""

import pytest
from rich.style import Style

from agents.wire import PAUSED, Pulse, Vitals
from cockpit.lines import Line
from cockpit.metrics import available, read
from cockpit.records import ranks
from cockpit.store import Store
from cockpit.theme import palette
from cockpit.widgets.inspector import inspector
from tests.screens.fake_run import FakeRun

HOT = Vitals(1, 5, device_percent=97.0, device_memory_bytes=70 << 30, power_w=690.0, temperature_c=88.0)


def store_with(*vitals: Vitals) -> Store:
    store = Store()
    store.apply(FakeRun().story(3))
    store.apply(vitals)
    return store


def test_vital_signs_are_offered_where_some_rank_has_them() -> None:
    keys = {metric.key for metric in available(store_with())}
    assert not keys & {"device", "device_memory", "power", "temperature", "clock"}
    store = store_with(HOT)
    metrics = {metric.key: metric for metric in available(store)}
    assert {"device", "device_memory", "power", "temperature"} <= set(metrics) and "clock" not in metrics
    readings = read(store, metrics["temperature"])
    assert readings[1].value == 88.0 and readings[0].value is None  # no data is not zero
    assert read(store, metrics["device_memory"])[1].value == 70.0


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        (PAUSED, "paused"),
        ("waiting for the snapshot", "waiting for the snapshot"),
        ("backward, micro-batch 2", "in backward, micro-batch 2"),
        ("", "in an unnamed operation"),
    ],
)
def test_the_inspector_says_naturally_what_a_rank_does(operation: str, said: str) -> None:
    store = store_with()
    store.apply([Pulse(1, 5, operation, 2000.0)])
    metric = available(store)[0]
    doing = inspector(store, metric, read(store, metric), 1, palette("cockpit-dark"))[-1]
    assert doing.strip(doing.width, Style()).text == f"{said} for 2.0 s"


def test_the_inspector_and_scripts_tell_them() -> None:
    store = store_with(Vitals(1, 5, temperature_c=88.0, throttle=["thermal"]))
    metric = available(store)[0]

    def text(rank: int) -> str:
        lines: list[Line] = inspector(store, metric, read(store, metric), rank, palette("cockpit-dark"))
        return "\n".join(line.strip(line.width, Style()).text for line in lines)

    assert "88 °C" in text(1) and "held down by thermal" in text(1)
    assert "°C" not in text(0) and "W" not in text(0)
    records = ranks(store)
    assert records[1]["vitals"]["temperature_c"] == 88.0 and records[1]["vitals"]["power_w"] is None
    assert records[0]["vitals"] is None
