"""What the control plane sends in a step of up to 256 ranks: messages and bytes of the gradient norm, the statistics
and the other collectives of all ranks. Ranks are threads."""

import math
from collections.abc import Callable
from math import ceil, log2
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agents.protocol import Summary
from engine.collectives.port import Port
from engine.config.layout import Layout
from engine.config.toml import load
from engine.metering.meter import Readings
from engine.planner.idle_time import Idle
from engine.planner.workload.communication.traffic import RANKS_MARKED, STATISTICS
from engine.telemetry.step_summary import Collected, Measured, StepConditions, StepSummaries
from engine.train.optimization.optimizer import GradientNorm
from tests.ranks.cases.case import LAYOUT
from tests.unit.engine.collectives.thread_port import MessageAxis, Network, on_network

WORLDS = [3, 17, 64, 256]
LAYERS, EXPERTS = 4, 8
SLOW = 2  # the rank with the longest step


def world_of(rank: int, ranks: int, network: Network) -> Any:
    axis = MessageAxis(rank, ranks, network)
    return SimpleNamespace(
        rank=rank,
        control=axis,
        all_ranks=axis,
        device=torch.device("cpu"),
        grid=SimpleNamespace(world=ranks, dp_replicate=1, tp=1),
        replicas=SimpleNamespace(size=2),
    )


def readings_of(rank: int) -> Readings:
    readings = Readings(LAYERS, EXPERTS)
    for number, lane in enumerate(readings.lanes.values()):
        lane.bytes, lane.ms, lane.exposed_ms = 1000 * number + rank, rank, rank / 2
    readings.a2a_to = {0: rank, 1: 5}
    readings.replica_bytes, readings.replica_bytes_plain = 2 * rank, 4 * rank
    readings.load[:] = torch.arange(LAYERS * EXPERTS).view(LAYERS, EXPERTS) * (rank + 1)
    readings.dropped[:] = rank
    return readings


def idle_of(rank: int) -> Idle | None:
    """The last rank does not know its idle time."""
    return None if rank % 2 else Idle(0.5, 0.25, 0.125, 0.125, 0.3 + rank)


@pytest.fixture(scope="module")
def layout() -> Layout:
    return load(LAYOUT, [f"model.layers={LAYERS}", f"model.moe.experts={EXPERTS}"])


@pytest.mark.parametrize("ranks", WORLDS)
def test_rank_0_receives_log2_of_the_ranks_statistics(ranks: int, layout: Layout) -> None:
    """The vector of a step has the same length for any number of ranks. Rank 0 receives one from each child in the
    binomial tree; every other rank sends one, to its parent."""
    conditions = StepConditions(5, 0, {}, 1e-3, 0.0)

    def work(rank: int, network: Network) -> list[Collected | None]:
        summaries = StepSummaries(layout, world_of(rank, ranks, network), oversubscribed=False)
        found = []
        for step_s in (2.0, 3.0):  # the vectors of two steps must not mix
            measured = Measured(0.25 * rank, 7.0, step_s + 10 * (rank == SLOW), idle_of(rank))
            summaries.gather(readings_of(rank), measured, conditions)
            found.append(summaries.collect())
        return found

    results, network = on_network(ranks, work)
    assert network.idle and results[1:] == [[None, None]] * (ranks - 1)
    vector = 8 * (STATISTICS + ceil(ranks / RANKS_MARKED) + LAYERS + LAYERS * EXPERTS)
    assert network.received(0) == [vector] * (2 * ceil(log2(ranks)))
    assert all(network.sent[rank] == [(rank & (rank - 1), vector)] * 2 for rank in range(1, ranks))

    # The summary, computed from one row per rank.
    rows, all_ranks = [readings_of(rank) for rank in range(ranks)], np.arange(ranks)
    known = [idle for idle in map(idle_of, range(ranks)) if idle]
    for collected, step_s in zip(results[0], (12.0, 13.0), strict=True):
        assert collected
        assert (collected.load == sum(row.load.numpy() for row in rows)).all()
        assert (collected.dropped == sum(row.dropped.numpy() for row in rows)).all()
        summary: Summary = collected.summary
        assert (summary.loss, summary.grad_norm) == (0.25 * all_ranks.sum(), 7.0)
        assert summary.step_ms == 1e3 * step_s
        assert summary.a2a_bytes == all_ranks.sum() + 5 * ranks
        assert (summary.replica_bytes, summary.replica_bytes_plain) == (
            2 * all_ranks.sum(),
            4 * all_ranks.sum(),
        )
        for number, traffic in enumerate(summary.comm.values()):
            assert traffic.bytes == 1000 * number * ranks + all_ranks.sum()
            assert (traffic.ms, traffic.exposed_ms) == (all_ranks.mean(), all_ranks.mean() / 2)
        assert summary.bubble == 0.5  # not lower, although half of the ranks do not know their idle time
        assert summary.bubble_bound == pytest.approx(np.mean([idle.bound for idle in known]))


def test_the_summary_names_the_ranks_whose_loss_is_not_finite(layout: Layout) -> None:
    ranks, broken = 130, {47: math.nan, 48: math.inf, 129: -math.inf}

    def work(rank: int, network: Network) -> Collected | None:
        summaries = StepSummaries(layout, world_of(rank, ranks, network), oversubscribed=False)
        measured = Measured(broken.get(rank, 1.0), math.nan, 1.0, None)
        summaries.gather(readings_of(rank), measured, StepConditions(0, 0, {}, 1e-3, 0.0))
        return summaries.collect()

    results, _ = on_network(ranks, work)
    assert results[0] and math.isnan(results[0].summary.loss or 0.0)
    assert results[0].summary.not_finite == [*broken]


def test_without_idle_times_there_is_no_bubble(layout: Layout) -> None:
    def work(rank: int, network: Network) -> Collected | None:
        summaries = StepSummaries(layout, world_of(rank, 2, network), oversubscribed=False)
        summaries.gather(
            readings_of(rank), Measured(1.0, 7.0, 1.0, None), StepConditions(0, 0, {}, 1e-3, 0.0)
        )
        return summaries.collect()

    (collected, _), _ = on_network(2, work)
    assert collected and collected.summary.bubble is collected.summary.bubble_parts is None


def test_the_error_of_a_lost_peer_is_raised_by_the_wait() -> None:
    class Lost(MessageAxis):
        def port(self, tag: int = 0) -> Port:
            def exchange(*_: object) -> None:
                raise RuntimeError("Connection closed by peer")

            transport: Any = SimpleNamespace(exchange=exchange)
            return Port(transport, range(self.size), self.rank)

    started = Lost(1, 2, Network()).start_reduce(torch.ones(3), Tensor.add_)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        started.wait()


@pytest.mark.parametrize("ranks", [17, 64, 256])
def test_the_gradient_norm_takes_log2_messages_and_is_equal_on_all_ranks(ranks: int) -> None:
    def work(rank: int, network: Network) -> float:
        stage = nn.Linear(3, 2)
        for parameter in stage.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        norm = GradientNorm([stage], world_of(rank, ranks, network))
        return float(norm())

    norms, network = on_network(ranks, work)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(sum(8 * (rank + 1) ** 2 for rank in range(ranks)) ** 0.5, rel=1e-6)
    at_most = ceil(log2(ranks)) + 1  # if the number of ranks is not a power of two, some ranks also fold
    assert all(len(network.sent[rank]) <= at_most for rank in range(ranks))
    assert {size for sent in network.sent.values() for _, size in sent} == {4}


def test_the_gradient_norm_stays_on_the_device() -> None:
    """Nothing can be copied from the device `meta` to the host. The sum over the ranks runs on the device's group, not
    on the hosts' group `control`."""
    stage, summed = nn.Linear(3, 2, device="meta"), list[Tensor]()
    for parameter in stage.parameters():
        parameter.grad = torch.empty_like(parameter)
    world: Any = SimpleNamespace(
        device=torch.device("meta"),
        all_ranks=SimpleNamespace(all_reduce=lambda x: summed.append(x) or x),
        grid=SimpleNamespace(dp_replicate=1, tp=1),
    )
    norm = GradientNorm([stage], world)()
    assert norm.is_meta and [(x.is_meta, x.shape) for x in summed] == [(True, ())]


COLLECTIVES: dict[str, Callable[[MessageAxis, Tensor], Tensor]] = {
    "all-gather": lambda axis, x: axis.all_gather(x),
    "all-reduce": lambda axis, x: axis.all_reduce(x),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_a_large_group_take_log2_messages(name: str, dtype: torch.dtype) -> None:
    """The votes, the digests of the corpus and the generated text of all ranks use these."""
    ranks = 65

    def work(rank: int, network: Network) -> Tensor:
        return COLLECTIVES[name](MessageAxis(rank, ranks, network), torch.tensor([[rank], [1]], dtype=dtype))

    results, network = on_network(ranks, work)
    rows = torch.tensor([[[rank], [1]] for rank in range(ranks)], dtype=dtype)
    right = rows if name == "all-gather" else rows.sum(0, dtype=dtype)
    assert all(result.equal(right) for result in results)
    assert max(len(sent) for sent in network.sent.values()) <= ceil(log2(ranks)) + 1
