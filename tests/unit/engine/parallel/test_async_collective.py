"""Tests the measured times of asynchronous collectives: the total time, and the part of it that no computation
overlaps."""

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from engine.config.compression import METHODS, CompressionValues, Method
from engine.metering.meter import Meter
from engine.parallel.collectives import AsyncCollective, Axis
from engine.planner.workload.communication.compressed_gradients import held_copies
from engine.sharding.compression.reductions import Compression, Segment
from engine.sharding.fsdp_collectives import AllGather, ReduceScatter
from engine.sharding.fsdp_hooks import FsdpUnit, GradientReductions
from tests.ranks.memory import live_storages
from tests.ranks.memory.live_storages import LiveStorages


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
        if len(out) > len(x):
            out.copy_(x.repeat(len(out) // len(x)))
        recorder = self

        class Noted(Slow):
            def wait(self, timeout: object = None) -> bool:
                recorder.waited += 1
                return True

        return Noted(0.0) if async_op else None


@pytest.mark.parametrize("method", [method for method in METHODS if method != "none"])
def test_a_compressed_sum_is_complete_as_soon_as_it_is_queued_on_a_gpu(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NCCL, the current stream waits for each collective, so the host never keeps the temporaries of a sum."""
    recorder, axis = Recorder(monkeypatch), Axis("dp", None, Meter())
    axis.size = 2
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, x, *_, group, async_op=False: out.copy_(x))
    monkeypatch.setattr(dist, "all_reduce", lambda x, group, async_op=False: None)
    compression = Compression(axis)
    compression.begin(0, CompressionValues(method, min_elements=1), 1.0)
    parameter = torch.nn.Parameter(torch.zeros(40, 50))
    running = compression.start(0, [Segment(parameter, "w", 0, (40, 50))], torch.randn(2000))
    assert running.advance() and not any(recorder.asked)


class InBackground(Axis):
    """Two replicas with equal gradients, whose collectives run in the background, as with gloo."""

    def __init__(self) -> None:
        super().__init__("dp", None, Meter())
        self.size = 2

    def _started(self) -> AsyncCollective:
        return AsyncCollective(self, "exchange", 0, (Slow(0.0),))

    def start_row_exchange(
        self, x: torch.Tensor, async_op: bool = False
    ) -> tuple[AsyncCollective, torch.Tensor]:
        return self._started(), x.clone()

    def start_all_gather(self, out: torch.Tensor, x: torch.Tensor, async_op: bool = False) -> AsyncCollective:
        out.copy_(x.repeat(2))
        return self._started()

    def start_all_reduce(self, x: torch.Tensor) -> AsyncCollective:
        x.mul_(2)
        return self._started()


@pytest.mark.parametrize("method", [method for method in METHODS if method != "none"])
def test_temporaries_of_compressed_sums_do_not_grow_with_the_units(method: Method) -> None:
    """While a backward pass reduces unit after unit over replicas, what a rank holds grows only by the residuals."""
    axis, n = InBackground(), 40 * 256
    compression = Compression(axis)
    compression.begin(0, CompressionValues(method, min_elements=1), 1.0)
    reductions, held = GradientReductions(axis, compression), list[int]()
    with LiveStorages() as live:
        for number in range(8):
            reductions.begin(last=True)
            parameter = torch.nn.Parameter(torch.empty(40, 256, device="meta"))
            unit = FsdpUnit.__new__(FsdpUnit)
            unit.number, unit.segments = number, [Segment(parameter, "w", 0, (40, 256))]
            reductions.add(unit, torch.ones(n), None)
            held.append(live.now())
        reductions.complete()
    # Two sums run at the same time, and end at the same time.
    grown = {after - before for start in (2, 3) for before, after in pairwise(held[start::2])}
    factor = sum(factor.nbytes for factor in compression._new_factors.values()) // 8
    assert grown == {2 * (4 * n + factor)}


@pytest.mark.parametrize("method", [method for method in METHODS if method != "none"])
@pytest.mark.parametrize("ratio", [0.01, 0.1])
def test_planner_knows_what_a_compressed_sum_holds(
    method: Method, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_storages, "LOOK", 1)
    axis, n = InBackground(), 400 * 256
    values = CompressionValues(method, ratio=ratio, min_elements=1)
    compression = Compression(axis)
    compression.begin(0, values, 1.0)
    segment = Segment(torch.nn.Parameter(torch.empty(400, 256, device="meta")), "w", 0, (400, 256))
    with LiveStorages() as live:
        flat = torch.randn(n)
        before, waiting = live.now(), 0
        running = compression.start(0, [segment], flat)
        while True:
            waiting = live.now() - before
            if running.advance():
                break
    planned_waiting, planned_peak = held_copies(values, 2)
    assert waiting / flat.nbytes == pytest.approx(planned_waiting, abs=0.07)
    assert (live.peak - before) / flat.nbytes == pytest.approx(planned_peak, abs=0.3)


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
