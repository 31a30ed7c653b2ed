"""Tests the measured times of asynchronous collectives: the total time, and the part of it that no computation
overlaps."""

import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from engine.config.compression import METHODS, CompressionValues, Method
from engine.metering.clocks import EventClock, WallClock
from engine.metering.meter import Meter
from engine.parallel import collectives
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


class Host(WallClock):
    """A simulated clock; `now` is the time in seconds."""

    now = 0.0

    def mark(self) -> float:
        return self.now


class Slow(dist.Work):
    """A work handle of a collective (`torch.distributed.Work`) that ends when its future completes; at the latest,
    `wait_s` seconds after `wait` is called."""

    def __init__(self, host: Host, wait_s: float) -> None:
        super().__init__()
        self.host, self.wait_s, self.future = host, wait_s, Future()

    def get_future(self) -> Future:  # type: ignore[override]
        return self.future

    def wait(self, timeout: object = None) -> bool:
        if self.wait_s:
            self.host.now += self.wait_s
            self.future.over(None)
        return True


def run(wait_s: float) -> tuple[float, float]:
    """(ms, exposed_ms) of a collective with 0.1 s of computation between its start and the wait. If `wait_s` is 0, it
    ends after half of the computation."""
    meter, host = Meter(), Host()
    meter.clock, work = host, Slow(host, wait_s)
    started = AsyncCollective(Axis("dp", None, meter), "reduce-scatter", 7, (work,))
    host.now += 0.05
    if not wait_s:
        work.future.over(None)
    host.now += 0.05
    started.wait()
    lane = meter.readings.lanes["dp"]
    assert lane.bytes == 7
    return lane.ms, lane.exposed_ms


def test_a_collective_that_ends_before_the_wait_is_hidden() -> None:
    assert run(wait_s=0.0) == (pytest.approx(50), 0)


def test_time_in_the_wait_is_exposed() -> None:
    assert run(wait_s=0.05) == (pytest.approx(150), pytest.approx(50))


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
        for name in ("all_gather_single", "reduce_scatter_single"):
            monkeypatch.setattr(collectives, name, self._collective)

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

        return Noted(Host(), 0.0) if async_op else None


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
        return AsyncCollective(self, "exchange", 0, (Slow(Host(), 0.0),))

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


class Streams:
    """A simulated GPU with streams: `now` is the time in ms up to which each stream has work."""

    def __init__(self) -> None:
        self.now = {"compute": 0.0}
        self.current = "compute"

    def compute(self, ms: float) -> None:
        self.now["compute"] += ms

    def aside(self) -> "Aside":
        return Aside(self)


class Aside:
    def __init__(self, streams: Streams):
        self.streams, self.name = streams, f"aside {len(streams.now)}"
        streams.now[self.name] = 0.0

    def __enter__(self) -> None:
        self.streams.current = self.name

    def __exit__(self, *_: object) -> None:
        self.streams.current = "compute"


class Event:
    def __init__(self, streams: Streams):
        self.streams, self.at = streams, 0.0

    def record(self) -> None:
        self.at = self.streams.now[self.streams.current]

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


class OnGpu(dist.Work):
    """A collective on NCCL, which ends `ms` after the compute stream launches it. `wait` makes the current stream wait
    and, as in torch, drops torch's references to the collective's tensors."""

    def __init__(self, streams: Streams, ms: float):
        super().__init__()
        self.streams, self.end = streams, streams.now["compute"] + ms

    def wait(self, timeout: object = None) -> bool:
        now = self.streams.now
        now[self.streams.current] = max(now[self.streams.current], self.end)
        return True

    def get_future(self) -> Future:  # type: ignore[override]
        raise AssertionError("its callbacks make torch record every output on another stream")


@pytest.mark.parametrize(
    ("collective_ms", "compute_ms", "ms", "exposed_ms"),
    [(30, 20, 30, 10), (15, 20, 15, 0), (20, 20, 20, 0), (30, 0, 30, 30)],
)
def test_on_a_gpu_the_exposed_part_counts_once(
    collective_ms: float, compute_ms: float, ms: float, exposed_ms: float
) -> None:
    """The host reaches the wait long before the GPU does, so only events show when the collective ended."""
    streams, meter = Streams(), Meter()
    meter.clock = EventClock(lambda: Event(streams), streams.aside)
    started = AsyncCollective(Axis("ep", None, meter), "all-to-all", 7, (OnGpu(streams, collective_ms),))
    streams.compute(compute_ms)
    started.wait()
    meter.settle()
    lane = meter.readings.lanes["ep"]
    assert (lane.ms, lane.exposed_ms, lane.bytes) == (pytest.approx(ms), pytest.approx(exposed_ms), 7)


def test_the_end_of_a_collective_does_not_depend_on_those_of_other_axes() -> None:
    streams, meter = Streams(), Meter()
    meter.clock = EventClock(lambda: Event(streams), streams.aside)
    slow = AsyncCollective(Axis("dp", None, meter), "all-gather", 0, (OnGpu(streams, 50),))
    ep = Axis("ep", None, meter)
    started = [AsyncCollective(ep, "all-to-all", 0, (OnGpu(streams, ms),)) for ms in (5, 7)]
    streams.compute(20)
    for one in (*started, slow):
        one.wait()
    meter.settle()
    lanes = meter.readings.lanes
    assert lanes["ep"].ms == pytest.approx(5 + 7) and lanes["ep"].exposed_ms == 0
    assert (lanes["dp"].ms, lanes["dp"].exposed_ms) == (pytest.approx(50), pytest.approx(30))
    assert len(streams.now) == 3  # compute, and one more for each axis


@pytest.fixture
def pair() -> Iterator[dist.ProcessGroup]:
    """Rank 1 of a group of two ranks whose collectives do nothing, in the place of NCCL."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    group = dist.group.WORLD
    assert group
    yield group
    dist.destroy_process_group()


STARTS: dict[str, Callable[[Axis, torch.Tensor], tuple[AsyncCollective, torch.Tensor]]] = {
    "all-to-all": lambda axis, x: axis.start_all_to_all(x, [2, 2], [2, 2]),
    "exchange": lambda axis, x: axis.start_row_exchange(x.view(2, 2), async_op=True),
    "ring": lambda axis, x: axis.start_ring(x),
    "all-gather": lambda axis, x: (axis.start_all_gather(out := torch.empty(8), x, True), out),
    "reduce-scatter": lambda axis, x: (axis.start_reduce_scatter(out := torch.empty(2), x, True), out),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_running_collective_keeps_its_tensors(name: str, pair: dist.ProcessGroup) -> None:
    """When the stream that records the end has waited, torch no longer keeps them, but the compute stream has not
    waited yet."""
    streams, meter = Streams(), Meter()
    meter.clock = EventClock(lambda: Event(streams), streams.aside)
    x = torch.ones(4)
    started, out = STARTS[name](Axis("ep", pair, meter), x)
    if name == "ring":
        started._works = (OnGpu(streams, 1.0),)  # this group has no work for a message
    assert {tensor.data_ptr() for tensor in started._tensors} == {x.data_ptr(), out.data_ptr()}
    started.wait()
    assert not started._tensors


def test_torch_warns_of_no_collective(pair: dist.ProcessGroup) -> None:
    """torch 2.13 has new names for two collectives, and warns at each use of the old ones."""
    axis, x = Axis("dp", pair, Meter()), torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        axis.all_gather(x)
        axis.reduce_scatter(x)
        axis.all_reduce(x)
        axis.exchange(x)
        axis.all_to_all(x, [1, 1], [1, 1])
        axis.start_all_reduce(torch.ones(4)).wait()
        for async_op in (False, True):
            axis.start_all_gather(torch.ones(8), torch.ones(4), async_op).wait()
            axis.start_reduce_scatter(torch.ones(4), torch.ones(8), async_op).wait()
            axis.start_row_exchange(x, async_op)[0].wait()
