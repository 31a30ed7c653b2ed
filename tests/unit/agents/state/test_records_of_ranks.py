"""The records of ranks in a run's state take little memory: long records stay encoded, and if several hellos have equal
`facts`, these are stored once."""

import copy

import msgspec
import pytest

from agents.protocol import Facts, Peers, ToPeer
from agents.state.encoded_records import EncodedRecords
from agents.state.hellos import MOST, Hellos
from tests.unit.agents.fleet import make_hello


def row(rank: int, step: int) -> Peers:
    return Peers(rank, step, [ToPeer(peer, 1000 * peer) for peer in range(8)])


def test_encoded_records_behave_like_a_dictionary() -> None:
    records = EncodedRecords(Peers)
    for rank in (3, 1):
        records[rank] = row(rank, 5)
    assert list(records) == [3, 1] and len(records) == 2 and 1 in records and 0 not in records
    assert records[3] == row(3, 5) and records.get(0) is None
    assert records == {3: row(3, 5), 1: row(1, 5)}
    for same in (copy.copy(records), records.copy()):
        records[3] = row(3, same[3].step + 1)
        assert same[3].step + 1 == records[3].step, "a copy does not change"
    del records[3]
    assert list(records) == [1]
    records.clear()
    assert not records
    with pytest.raises(KeyError):
        records[1]


def decoded(facts: Facts, rank: int) -> Hellos:
    """A dictionary with one rank's hello, which was just decoded and so shares no objects with other hellos."""
    known = Hellos()
    hello = make_hello(rank, 8, facts=facts, capabilities=["a"])
    known[rank] = msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=type(hello))
    return known


def test_equal_facts_and_texts_are_kept_once() -> None:
    hellos = Hellos()
    for rank in range(4):
        hello = decoded({"model": "x" * 100, "held": f"0-{rank // 2}", "cores": 2}, rank)[rank]
        hellos[rank] = hello
        assert hellos[rank] == hello
    assert hellos[0].facts is hellos[1].facts and hellos[2].facts is hellos[3].facts
    assert hellos[0].facts is not hellos[2].facts
    assert hellos[0].facts["model"] is hellos[2].facts["model"]
    assert hellos[0].run is hellos[3].run and hellos[0].capabilities is hellos[3].capabilities
    assert copy.copy(hellos) == hellos


def test_facts_that_are_equal_but_of_another_type_stay_apart() -> None:
    hellos = Hellos()
    for rank, value in enumerate((True, 1, 1.0)):
        hellos[rank] = make_hello(rank, 4, facts={"flag": value})
    assert [type(hellos[rank].facts["flag"]) for rank in range(3)] == [bool, int, float]


def test_shared_facts_are_bounded() -> None:
    hellos = Hellos()
    for number in range(MOST // 2 + 10):
        hellos[0] = make_hello(0, 1, facts={"number": number})
    assert len(hellos._facts) + len(hellos._texts) <= MOST + 10
    assert hellos[0].facts == {"number": MOST // 2 + 9}
