"""Ranks send samples, such as the load of every expert, at a low rate; more often while a client requests them, and
never more often than the hub's limit allows."""

import pytest

from agents.client import Client
from agents.hub.telemetry import sampling_leases as leases_module
from agents.hub.telemetry.sampling_leases import (
    CLIENTS,
    MESSAGES_PER_S,
    RANKS_PER_TURN,
    RENEW_S,
    REQUEST_S,
    SAMPLE_PERIOD_S,
    SamplingLeases,
)
from agents.protocol import Experts, LayerLoad, Sample
from agents.rank.sampling import CAPABILITIES, EVERY, Sampling
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import Agent, HubProcess, make_hello, make_summary, poll_until

HERE = {rank: b"%d" % rank for rank in range(8)}


def asked(leases: SamplingLeases, now: float, step_ms: float = 100.0) -> dict[bytes, dict[str, int]]:
    told = leases.requests_due(HERE, step_ms, now)
    return {identity: {sample.kinds[0]: sample.every for sample in samples} for identity, samples in told}


def test_without_a_request_ranks_sample_the_same_steps() -> None:
    early, late = Sampling(), Sampling()
    assert early.due("peers", 0) and late.due("peers", 7)  # each rank sends a first sample at once
    assert [step for step in range(8, 100) if early.due("peers", step)] == [20, 40, 60, 80]
    assert [step for step in range(8, 100) if late.due("peers", step)] == [20, 40, 60, 80]


def test_a_lease_raises_the_rate_until_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    sampling = Sampling()
    assert sampling.due("peers", 0) and sampling.due("timeline", 0)
    sampling.take(Sample(["peers"], 5.0, every=4))
    assert [step for step in range(1, 13) if sampling.due("peers", step)] == [4, 8, 12]
    assert not sampling.due("timeline", 4)
    now = 105.0
    assert [step for step in range(1, EVERY + 1) if sampling.due("peers", step)] == [EVERY]


def test_ranks_get_requests_and_renewals_in_time() -> None:
    leases = SamplingLeases()
    assert leases.ask(b"a", Sample(["peers", "of tomorrow"], 60.0, [2, 3]), 0.0) is None
    # twice a second at 100 ms per step, with the interval rounded up to a power of two
    assert asked(leases, 0.0) == {
        b"2": {"peers": 8},
        b"3": {"peers": 8},
    }
    assert asked(leases, 0.5) == {}
    assert RENEW_S < REQUEST_S
    assert set(asked(leases, RENEW_S)) == {b"2", b"3"}
    assert leases.ask(b"b", Sample(["experts"], 1.0), RENEW_S) is None
    assert asked(leases, RENEW_S)[b"2"] == {"experts": 8, "peers": 8}
    # Client b has ended its request.
    assert asked(leases, RENEW_S + 2) == {b"2": {"peers": 8}, b"3": {"peers": 8}}
    assert leases.ask(b"a", Sample([], 0.0), 7.0) is None
    assert asked(leases, 20.0) == {}


def test_a_reconnected_rank_gets_the_request_again() -> None:
    leases = SamplingLeases()
    leases.ask(b"a", Sample(["peers"], 60.0, [2]), 0.0)
    assert asked(leases, 0.0)
    assert [identity for identity, _ in leases.requests_due(HERE | {2: b"new"}, 100.0, 0.1)] == [b"new"]


def test_ranks_behind_one_relay_share_a_request() -> None:
    """With a separate message for each of 1024 ranks, the queue of the relay's socket would overflow and drop
    messages."""
    leases = SamplingLeases()
    leases.ask(b"a", Sample(["peers"], 60.0), 0.0)
    behind = dict.fromkeys(range(100), b"relay") | {100: b"own"}
    told = dict(leases.requests_due(behind, 100.0, 0.0))
    assert [sample.ranks for sample in told[b"relay"]] == [list(range(100))]
    assert [sample.ranks for sample in told[b"own"]] == [[100]]


def test_the_sample_rate_is_bounded_for_any_number_of_clients() -> None:
    leases = SamplingLeases()
    for client in range(CLIENTS):
        assert leases.ask(b"%d" % client, Sample(["peers"], 60.0), 0.0) is None
    assert "256 clients already request samples" in (
        leases.ask(b"one more", Sample(["peers"], 60.0), 0.0) or ""
    )
    world = {rank: b"%d" % rank for rank in range(16_384)}
    told = list(leases.requests_due(world, 100.0, 0.0))
    assert len(told) == RANKS_PER_TURN
    every = told[0][1][0].every
    assert len(world) / (every * 0.1) <= MESSAGES_PER_S
    fast = next(leases.requests_due(HERE, 0.0, 9.0))[1][0]  # a step time of zero
    assert fast.every * 1e-3 >= SAMPLE_PERIOD_S / 1000


def test_the_cost_of_leases_does_not_grow_with_ranks_times_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(frozenset[int]):
        looks = 0

        def __contains__(self, rank: object) -> bool:
            Counted.looks += 1
            return super().__contains__(rank)

    monkeypatch.setattr(leases_module, "frozenset", Counted, raising=False)
    leases = SamplingLeases()
    for client in range(CLIENTS):
        leases.ask(b"%d" % client, Sample(["peers"], 60.0, [client]), 0.0)
    Counted.looks = 0
    world = {rank: b"%d" % rank for rank in range(1000)}
    told = [identity for identity, _ in leases.requests_due(world, 100.0, 0.0)]
    assert told == [b"%d" % rank for rank in range(CLIENTS)] and Counted.looks <= len(world)


def test_a_sample_request_reaches_the_rank_through_the_hub(hub: HubProcess, opened: Opened) -> None:
    agent = opened(Agent(hub.endpoints.ranks, lambda: (1, "forward", 0.0)))
    agent.introduce(make_hello(0, 1, capabilities=list(CAPABILITIES)), None)
    client = opened(Client(hub.endpoints.clients))
    client.request_samples("experts")
    step = 1

    def train() -> None:
        nonlocal step
        step += 1
        agent.send(make_summary(step))
        if agent.wants("experts", step):
            agent.send(Experts(step, [LayerLoad(0, [1, 2], 0)]))

    assert leases_module.SAMPLE_PERIOD_S == 0.5  # every 64th step if a step takes 10 ms
    poll_until(
        client, lambda: client.state.experts and client.state.experts.step % 64 == 0 and step % EVERY, train
    )
