"""Tests the measured times of asynchronous collectives: the total time, and the part of it that no computation
overlaps."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from engine.metering.meter import Meter
from engine.parallel.collectives import AsyncCollective, Axis
from engine.sharding.fsdp_collectives import AllGather, ReduceScatter


class Future:
    def __init__(self) -> None:
        self.over: Callable[[object], None] = lambda _: None

    def add_done_callback(self, over: Callable[[object], None]) -> None:
        self.over = over


class Slow(dist.Work):
    """A work handle of a collective (`torch.distributed.Work`) whose `wait` takes `wait_s` seconds; its future may
    complete before `wait` is called."""

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


class Recorder:
    """Replaces two of torch's collectives; records the `async_op` of each call, and counts the waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.asked: list[bool] = []
        self.waited = 0
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            monkeypatch.setattr(dist, name, self._collective)

    def _collective(
        self, out: torch.Tensor, x: torch.Tensor, group: object, async_op: bool = False
    ) -> dist.Work | None:
        self.asked.append(async_op)
        recorder = self

        class Noted(Slow):
            def wait(self, timeout: object = None) -> bool:
                recorder.waited += 1
                return True

        return Noted(0.0) if async_op else None


def test_fsdps_async_op_reaches_nccl_and_its_work_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 requests an asynchronous gather on the compute stream, which a blocking gather would stall. If FSDP2
    requests a blocking gather, the gather must not return a work handle, because FSDP2 would then skip the wait for its
    own streams."""
    recorder, axis = Recorder(monkeypatch), Axis("dp", None, Meter())
    axis.size = 2
    out, x, started = torch.empty(4), torch.empty(2), list[AsyncCollective]()
    group: dist.ProcessGroup = None  # type: ignore[assignment]
    assert AllGather(axis)(out, x, group, async_op=False) is None
    work = AllGather(axis)(out, x, group, async_op=True)
    assert recorder.asked == [False, True] and isinstance(work, dist.Work) and not recorder.waited
    assert work.wait() and recorder.waited == 1
    for async_op in (False, True):
        ReduceScatter(axis, started.append)(x, out, group, dist.ReduceOp.SUM, async_op=async_op)
    assert recorder.asked[2:] == [False, True] and [s.in_background for s in started] == [False, True]
    started[1].wait()
    assert recorder.waited == 2 and axis.meter.readings.lanes["dp"].bytes == 2 * (8 + 8)
