"""A GPU's clock on events that come to pass when they like: what is told, when, and that nobody waits."""

from collections.abc import Iterator

import pytest

from engine.metering.clocks import EventClock, WallClock
from engine.metering.meter import Meter


class Gpu:
    """A device whose events happen, in order, when the test says so; the time of each is its number, in ms."""

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
        assert self.query() and end.query(), "CUDA raises where an event has not come to pass"
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


def test_nothing_is_told_before_it_has_come_to_pass(gpu: Gpu) -> None:
    clock, told = EventClock(gpu.make), list[float]()
    begin = clock.mark()
    clock.mark()
    clock.between(begin, clock.mark(), told.append)
    clock.collect()
    gpu.catch_up(behind=1)
    clock.collect()
    assert told == []
    gpu.catch_up()
    clock.collect()
    clock.collect()
    assert told == [0.002]


def step(meter: Meter) -> None:
    """Two actions with a collective in the first and one between them; each mark takes a millisecond."""
    with meter.pipeline():
        with meter.action("F", 0, 0), meter.collective("tp", "all-gather", 10):
            pass
        with meter.collective("dp", "all-gather", 5):
            pass
        with meter.action("B", 0, 0):
            pass
        with meter.action_goes_on():
            pass


def test_a_step_is_read_as_on_the_wall(meter: Meter, gpu: Gpu) -> None:
    step(meter)
    readings = meter.readings
    assert (
        readings.window == 0.0 and readings.lanes["tp"].bytes == 10
    )  # bytes are known at once, times are not
    gpu.catch_up()
    meter.settle()
    # opened 1, resting 2; awake 3, F 4 to 7 with tp 5 to 6, resting 8; awake 9, dp 10 to 11, resting 12; awake 13, B 14
    # to 15, resting 16; the loss, resting 17, B to 18
    assert [(span.start, span.end) for span in readings.spans] == [(0.003, 0.006), (0.013, 0.017)]
    assert readings.lanes["tp"].ms == readings.lanes["tp"].exposed_ms == pytest.approx(1)
    assert readings.lanes["dp"].ms == pytest.approx(1)
    assert readings.waited == pytest.approx(0.003)
    assert readings.lanes["pp"].ms == readings.lanes["pp"].exposed_ms == pytest.approx(3)


def test_what_is_late_goes_to_its_own_step(meter: Meter, gpu: Gpu) -> None:
    step(meter)
    first = meter.readings
    meter.start_step(1)
    step(meter)
    gpu.passed = 18
    meter.settle()
    assert first.window == 0.017 and meter.readings.window == 0.0


def test_events_are_used_again(meter: Meter, gpu: Gpu) -> None:
    for number in range(1, 50):
        step(meter)
        gpu.catch_up()
        meter.settle()
        meter.start_step(number)
    assert len(gpu.made) == 18


def test_a_gpu_that_never_answers_costs_a_bounded_number_of_events(meter: Meter, gpu: Gpu) -> None:
    for number in range(1, 50):
        step(meter)
        meter.start_step(number)
    assert len(gpu.made) <= 18 * EventClock.STEPS
    gpu.catch_up()
    meter.settle()  # whatever is still to be told is of events that nobody has recorded again since


def test_an_event_in_use_is_not_recorded_again(meter: Meter, gpu: Gpu) -> None:
    step(meter)
    gpu.catch_up(behind=1)
    meter.start_step(1)
    held = set(map(id, gpu.made))
    fresh = meter.clock.mark()
    assert id(fresh) not in held


def test_the_wall_tells_at_once() -> None:
    clock, told = WallClock(), list[float]()
    begin = clock.mark()
    clock.between(begin, begin + 2.0, told.append)
    assert told == [2.0]
