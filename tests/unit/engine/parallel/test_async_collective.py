"""Asynchronous collectives: total time, and the exposed part of it."""

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from engine.metering.meter import Meter
from engine.parallel.collectives import AsyncCollective, Axis


class Future:
    def __init__(self) -> None:
        self.over: Callable[[object], None] = lambda _: None

    def add_done_callback(self, over: Callable[[object], None]) -> None:
        self.over = over


class Slow(dist.Work):
    """Work whose `wait` takes `wait_s` seconds; its future may complete before `wait` is called."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s, self.future = wait_s, Future()

    def get_future(self) -> Future:  # type: ignore[override]
        return self.future

    def wait(self, timeout: object = None) -> bool:
        time.sleep(self.wait_s)
        return True


def run(compute_s: float, wait_s: float) -> tuple[float, float]:
    """(ms, exposed_ms) of a collective with `compute_s` seconds of computation between its start and the wait."""
    meter = Meter()
    work = Slow(wait_s)
    started = AsyncCollective(Axis("dp", None, meter), "reduce-scatter", 7, (work,))
    time.sleep(compute_s / 2)
    if not wait_s:
        work.future.over(None)
    time.sleep(compute_s / 2)
    started.wait()
    lane = meter.readings.lanes["dp"]
    assert lane.bytes == 7
    return lane.ms, lane.exposed_ms


def test_a_collective_that_ends_before_the_wait_is_hidden() -> None:
    ms, exposed = run(compute_s=0.1, wait_s=0.0)
    assert exposed < 20
    assert ms == pytest.approx(50, abs=25)  # the collective is complete after half of the computation


def test_time_in_the_wait_is_exposed() -> None:
    ms, exposed = run(compute_s=0.1, wait_s=0.05)
    assert exposed == pytest.approx(50, abs=25)
    assert ms == pytest.approx(150, abs=40)


def test_without_work_the_wait_costs_nothing() -> None:
    meter = Meter()
    finished: list[int] = []
    AsyncCollective(Axis("dp", None, meter), "gather", 0, (), lambda: finished.append(1)).wait()
    assert not finished and meter.readings.lanes["dp"].ms == 0.0
