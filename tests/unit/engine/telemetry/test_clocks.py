"""Tests the event clock on a simulated GPU: when callbacks run, which step they belong to, and that nothing blocks."""

from collections.abc import Iterator

import pytest

from engine.metering.clocks import EventClock, WallClock
from engine.metering.meter import Meter


class Gpu:
    """A simulated GPU. Of the recorded events, the first `passed` are complete, and event n has the timestamp n ms."""

    def __init__(self) -> None:
        self.made: list[Event] = []
        self.recorded = self.passed = 0

    def make(self) -> "Event":
        self.made.append(Event(self))
        return self.made[-1]

    def catch_up(self, behind: int = 0) -> None:
        self.passed = self.recorded - behind


class Event:
    def __init__(self, gpu: Gpu):
        self.gpu, self.at = gpu, 0

    def record(self) -> None:
        self.gpu.recorded += 1
        self.at = self.gpu.recorded

    def query(self) -> bool:
        return self.at <= self.gpu.passed

    def elapsed_time(self, end: "Event") -> float:
        assert self.query() and end.query(), "CUDA raises if an event is still pending"
        return end.at - self.at

    def synchronize(self) -> None:
        raise AssertionError("a meter never waits")

    wait = synchronize


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def meter(gpu: Gpu) -> Iterator[Meter]:
    meter = Meter()
    meter.clock = EventClock(gpu.make)
    meter.start_step(0)
    yield meter


def test_callbacks_run_after_the_gpu_has_passed_both_events(gpu: Gpu) -> None:
    clock, seconds = EventClock(gpu.make), list[float]()
    begin = clock.mark()
    clock.mark()
    clock.between(begin, clock.mark(), seconds.append)
    clock.collect()
    gpu.catch_up(behind=1)
    clock.collect()
    assert seconds == []
    gpu.catch_up()
    clock.collect()
    clock.collect()
    assert seconds == [0.002]


def step(meter: Meter) -> None:
    """Runs a forward and a backward pipeline action, with one collective in the first action and one between the
    actions; successive events on the simulated GPU are 1 ms apart."""
    with meter.pipeline():
        with meter.action("F", 0, 0), meter.collective("tp", "all-gather", 10):
            pass
        with meter.collective("dp", "all-gather", 5):
            pass
        with meter.action("B", 0, 0):
            pass
        with meter.action_goes_on():
            pass


def test_a_step_gets_its_times(meter: Meter, gpu: Gpu) -> None:
    step(meter)
    readings = meter.readings
    # bytes are available immediately, times only later
    assert readings.window == 0.0 and readings.lanes["tp"].bytes == 10
    gpu.catch_up()
    meter.settle()
    # Marks by time in ms: start 1, idle from 2 to 3, F from 4 to 7 with tp from 5 to 6, idle from 8 to 9, dp from 10 to
    # 11, idle from 12 to 13, B from 14 to 15, idle from 16. The loss extends B to 18.
    assert [(span.start, span.end) for span in readings.spans] == [(0.003, 0.006), (0.013, 0.017)]
    assert readings.lanes["tp"].ms == readings.lanes["tp"].exposed_ms == pytest.approx(1)
    assert readings.lanes["dp"].ms == pytest.approx(1)
    assert readings.waited == pytest.approx(0.003)
    assert readings.lanes["pp"].ms == readings.lanes["pp"].exposed_ms == pytest.approx(3)


def test_late_times_go_to_their_own_step(meter: Meter, gpu: Gpu) -> None:
    step(meter)
    first = meter.readings
    meter.start_step(1)
    step(meter)
    gpu.passed = 18
    meter.settle()
    assert first.window == 0.017 and meter.readings.window == 0.0


def test_events_are_reused(meter: Meter, gpu: Gpu) -> None:
    for number in range(1, 50):
        step(meter)
        gpu.catch_up()
        meter.settle()
        meter.start_step(number)
    assert len(gpu.made) == 18


def test_the_number_of_events_is_bounded_if_the_gpu_hangs(meter: Meter, gpu: Gpu) -> None:
    for number in range(1, 50):
        step(meter)
        meter.start_step(number)
    assert len(gpu.made) <= 18 * EventClock.STEPS
    gpu.catch_up()
    meter.settle()  # no pending measurement uses an event that has been recorded again


def test_an_event_in_use_is_not_recorded_again(meter: Meter, gpu: Gpu) -> None:
    step(meter)
    gpu.catch_up(behind=1)
    meter.start_step(1)
    held = set(map(id, gpu.made))
    fresh = meter.clock.mark()
    assert id(fresh) not in held


def test_the_wall_clock_calls_back_at_once() -> None:
    clock, seconds = WallClock(), list[float]()
    begin = clock.mark()
    clock.between(begin, begin + 2.0, seconds.append)
    assert seconds == [2.0]
