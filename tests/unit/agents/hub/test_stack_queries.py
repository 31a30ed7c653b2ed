"""Collecting stacks: one collection at a time serves all clients, and a rank that does not answer is named."""

import os

import pytest
from msgspec import structs

from agents.hub.commands import stack_queries
from agents.hub.commands.stack_queries import CLIENTS, COLLECT_S, PERIOD_S, StackQueries
from agents.hub.telemetry.membership import Membership
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import (
    STACKS,
    STACKS_FACT,
    AnyMessage,
    CodeFrame,
    RankStacks,
    StackQuery,
    StacksCollected,
    ThreadStack,
    codec,
)
from agents.transport.roles import Role, refusal
from tests.unit.agents.fleet import make_hello

Told = list[tuple[bytes, AnyMessage]]
WORLD = 4


class Harness:
    """Four ranks; the agent of rank 2 is of an earlier release, which cannot send stacks. `told`: the sent messages,
    each with its recipient."""

    def __init__(self) -> None:
        self.told: Told = []
        self.update_log, membership = UpdateLog(), Membership("r")
        for rank in range(WORLD):
            hello = make_hello(rank, WORLD, capabilities=[] if rank == 2 else [STACKS])
            membership.hello(b"rank%d" % rank, hello, 0.0)
            self.update_log.publish(hello)
        self.queries = StackQueries(self.update_log, membership, self.send)

    def send(self, peer: bytes, frame: bytes) -> None:
        self.told += [(peer, message) for message in codec.decode(frame)]

    def to(self, peer: bytes) -> list[AnyMessage]:
        found = [message for name, message in self.told if name == peer]
        self.told = [(name, message) for name, message in self.told if name != peer]
        return found

    def answer(self, *ranks: int) -> None:
        for rank in ranks:
            for query in self.to(b"rank%d" % rank):
                assert isinstance(query, StackQuery)
                frame = CodeFrame("/job/train.py", 50 if rank == 3 else 40, "train")
                threads = [ThreadStack("MainThread", [frame])] + [ThreadStack("other", [])] * query.threads
                self.queries.take(RankStacks(rank, query.id, 1, "", 0.0, threads))


def test_a_client_gets_every_field_of_a_ranks_stacks() -> None:
    """Also fields that are added later: each field has a value that is not the default."""
    threads = [ThreadStack("MainThread", []), ThreadStack("other", [])]
    stacks = RankStacks(3, "own", 7, "forward", 2.0, threads, 5, "all-reduce 9")
    defaults = {field.name: field.default for field in structs.fields(RankStacks)}
    assert all(getattr(stacks, name) != default for name, default in defaults.items())
    asked = StackQuery("q", [3], threads=True)
    assert stack_queries._for_client(stacks, asked) == structs.replace(stacks, id="q")
    only_training = structs.replace(stacks, id="q", threads=threads[:1], omitted_threads=0)
    assert stack_queries._for_client(stacks, structs.replace(asked, threads=False)) == only_training


@pytest.fixture
def hub() -> Harness:
    return Harness()


def test_one_collection_serves_all_clients_that_wait(hub: Harness) -> None:
    hub.queries.ask(b"c", StackQuery("q"))
    hub.queries.ask(b"d", StackQuery("p", [3], threads=True))
    hub.queries.turn(10.0)
    assert [peer for peer, _ in hub.told] == [b"rank0", b"rank1", b"rank3"]
    hub.queries.ask(b"c", StackQuery("q"))  # repeated by the client
    hub.answer(0, 1, 3)
    hub.queries.turn(10.1)
    *answers, end = hub.to(b"c")
    assert [(one.rank, one.id, len(one.threads)) for one in answers if isinstance(one, RankStacks)] == [
        (rank, "q", 1) for rank in (0, 1, 3)
    ]
    assert isinstance(end, StacksCollected) and (end.answered, end.world) == (3, WORLD)
    assert [one.rank for one in end.unanswered] == [2] and "older release" in end.unanswered[0].why
    (one, end) = hub.to(b"d")
    assert isinstance(one, RankStacks) and (one.rank, len(one.threads)) == (3, 2)
    assert isinstance(end, StacksCollected) and end.unanswered == []


def test_a_silent_rank_is_named_with_its_process_and_the_rate_is_limited(hub: Harness) -> None:
    hub.queries.ask(b"c", StackQuery("q"))
    hub.queries.turn(10.0)
    hub.answer(0, 1)
    hub.queries.turn(10.0 + COLLECT_S - 0.1)
    assert hub.to(b"c") == []
    hub.queries.turn(10.0 + COLLECT_S)
    *_, end = hub.to(b"c")
    assert isinstance(end, StacksCollected)
    why = {one.rank: one.why for one in end.unanswered}[3]
    assert why.startswith(f"process {os.getpid()} is alive but silent")
    hub.answer(3)  # too late
    hub.queries.ask(b"c", StackQuery("q"))  # its answer was lost
    *again, same = hub.to(b"c")
    assert same == end and len(again) == 2

    hub.queries.ask(b"d", StackQuery("r", [0]))
    hub.queries.turn(20.0)
    hub.answer(0)
    hub.queries.turn(20.1)
    hub.queries.ask(b"d", StackQuery("s", [0]))
    hub.queries.turn(20.0 + PERIOD_S - 0.1)
    assert hub.to(b"rank0") == []
    hub.queries.turn(20.0 + PERIOD_S)
    assert len(hub.to(b"rank0")) == 1 and hub.to(b"rank1") == []


def test_a_stall_is_explained_by_one_event(hub: Harness) -> None:
    hub.queries.explain_stall([3])
    hub.queries.turn(10.0)
    hub.answer(0, 1, 3)
    for now in (10.1, 20.0, 30.0):
        hub.queries.turn(now)
    (event,) = hub.update_log.state.events
    assert event.text.startswith("2 of 4 ranks are in train (train.py:40); rank 3 is in train (train.py:50)")
    assert (event.facts[STACKS_FACT], event.facts["rank"], event.facts["odd"]) == (3, 2, 2)


def test_the_memory_of_a_hub_is_bounded(hub: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(CLIENTS):
        assert hub.queries.ask(b"c%d" % number, StackQuery(f"q{number}")) is None
    assert "wait for stacks already" in str(hub.queries.ask(b"d", StackQuery("q")))
    monkeypatch.setattr(stack_queries, "KEPT_BYTES", 100)
    hub.queries.turn(10.0)
    hub.answer(0, 1, 3)
    hub.queries.turn(10.1)
    *answers, end = hub.to(b"c0")
    assert len(answers) == 1 and isinstance(end, StacksCollected)
    assert [one.rank for one in end.unanswered] == [1, 2, 3] and "MiB" in end.unanswered[0].why


def test_stacks_need_the_role_operator() -> None:
    query = StackQuery("q")
    assert refusal(Role.OPERATOR, "ann", query) is None
    assert refusal(Role.VIEWER, "ann", query) == (
        "the key ann has the role viewer; stacks show source code and require the role operator"
    )
    assert "role rank" in str(refusal(Role.OPERATOR, "ann", RankStacks(0, "q", 1, "", 0.0, [])))


def test_repeated_and_foreign_answers_take_no_room(hub: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.queries.ask(b"c", StackQuery("q", [0, 1]))
    hub.queries.turn(10.0)
    (query,) = hub.to(b"rank0")
    assert isinstance(query, StackQuery)
    first, second, foreign = (RankStacks(rank, query.id, 1, "", 0.0, []) for rank in (0, 1, 3))
    monkeypatch.setattr(stack_queries, "KEPT_BYTES", 2 * len(codec.pack(first)))
    for one in (first, first, foreign, second):
        hub.queries.take(one)
    hub.queries.turn(10.1)
    *answers, end = hub.to(b"c")
    assert [one.rank for one in answers if isinstance(one, RankStacks)] == [0, 1]
    assert isinstance(end, StacksCollected) and end.unanswered == []
