"""Fault 20 of docs/evidence/faults.md: an older agent with a newer hub, and a newer agent with an older hub. Within one
major version of the protocol, agent and hub work together with the messages and fields that both releases have.

The tests use plain sockets to act as the other release: for an older release they omit fields, and for a newer one they
add invented fields.
"""

from collections.abc import Iterator

import msgpack
import pytest
import zmq

from agents import protocol
from agents.client import Client
from agents.protocol import Credit, Refused, Sample, Step, codec
from agents.rank.agent import Agent
from agents.rank.sampling import CAPABILITIES
from agents.rundir.socket_directory import endpoints_in, make_socket_directory, remove_sockets
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import Fleet, HubProcess, Peer, make_hello, make_step, make_summary, poll_until

NEWER = ["sparkle", {"depth": [1, 2]}, "of a later release"]


def old_hello(rank: int, world: int) -> list[object]:
    """The Hello of the first release: no fields after `leader`."""
    fields = (
        "run",
        "rank",
        "world",
        "coords",
        "host",
        "pid",
        "device",
        "layout",
        "revision",
        "step",
        "leader",
    )
    hello = make_hello(rank, world)
    return ["hello", hello.version, *(getattr(hello, field) for field in fields)]


def packed(*messages: object, version: int = protocol.VERSION) -> bytes:
    data: bytes = msgpack.packb([version, list(messages)])
    return data


def test_known_fields_of_a_newer_agent_are_read(own_hub: HubProcess, opened: Opened) -> None:
    client, newer = opened(Client(own_hub.endpoints.clients)), opened(Peer(own_hub.endpoints.ranks))
    step = msgpack.unpackb(codec.pack(make_step(0, 7)))
    newer.dealer.send(
        packed([*old_hello(0, 1), {}, ["sparkles"], 0.0, None, False, 0, 0, "appended"], NEWER, step)
    )
    poll_until(client, lambda: 0 in client.state.steps)
    assert client.state.steps[0].step == 7
    poll_until(
        client, lambda: any("'sparkle', which this hub does not know" in e.text for e in client.state.events)
    )
    with pytest.raises(AssertionError, match="no Refused"):
        newer.hear(Refused, timeout_s=0.3)


def test_an_older_agent_gets_no_unknown_messages(own_hub: HubProcess, opened: Opened) -> None:
    client, older, newer = (
        opened(Client(own_hub.endpoints.clients)),
        opened(Peer(own_hub.endpoints.ranks)),
        opened(Peer(own_hub.endpoints.ranks)),
    )
    older.dealer.send(packed(old_hello(0, 2)))
    newer.say(make_hello(1, 2, capabilities=list(CAPABILITIES)))
    older.say(make_step(0, 1), make_summary(1))
    poll_until(client, lambda: len(client.state.hellos) == 2 and client.state.summaries)
    assert client.state.hellos[0].capabilities == [] and client.state.hellos[0].age_s is None
    client.request_samples("peers")
    poll_until(client, lambda: newer.dealer.poll(0))
    assert isinstance(newer.hear(Sample), Sample)
    with pytest.raises(AssertionError, match="no Sample"):
        older.hear(Sample, timeout_s=1.0)


class OtherHub:
    """A plain socket that acts as a hub of another release."""

    def __init__(self) -> None:
        self.endpoints = endpoints_in(make_socket_directory())
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.set(zmq.LINGER, 0)
        self.router.bind(self.endpoints.ranks)

    def hear(self, timeout_ms: int = 5000) -> tuple[bytes, list[object]]:
        assert self.router.poll(timeout_ms), "no message arrived"
        identity, frame = self.router.recv_multipart()
        return identity, msgpack.unpackb(frame)[1]

    def close(self) -> None:
        self.router.close()
        self.context.term()
        remove_sockets(self.endpoints)


@pytest.fixture
def other_hub(opened: Opened) -> Iterator[OtherHub]:
    yield opened(OtherHub())


def test_an_agent_ignores_unknown_messages_of_a_newer_hub(other_hub: OtherHub, opened: Opened) -> None:
    agent = opened(Agent(other_hub.endpoints.ranks, lambda: (3, "forward", 0.0)))
    agent.introduce(make_hello(0, 1), None)
    identity, _ = other_hub.hear()
    other_hub.router.send_multipart([identity, packed(NEWER, ["welcome", "e", [], "appended"])])
    # the agent keeps sending records, and answers the Welcome in the same frame with its hello
    for _ in range(20):
        agent.send(make_step(0, 4))
        _, said = other_hub.hear(1500)  # a refused agent would send nothing for 2 s
        assert agent.refused is None
        if any(message[0] == "hello" for message in said if isinstance(message, list)):
            break
    else:
        raise AssertionError("the Welcome was not heard")


def test_a_client_counts_unknown_updates(other_hub: OtherHub, opened: Opened) -> None:
    client = opened(Client(other_hub.endpoints.ranks))
    client.poll(0.1)
    identity, said = other_hub.hear()
    assert said[0][0] == "credit"  # type: ignore[index]
    gone = ["gone", 0, True, ""]
    snapshot = ["updates", "e", 5, [gone, NEWER], True, 1, 1.0]
    live = ["updates", "e", 8, [NEWER, ["pulse", 0, 4, "forward", 1.0, None], NEWER], False, 0, 1.0]
    for frame in (snapshot, live):
        other_hub.router.send_multipart([identity, packed(frame)])
    poll_until(client, lambda: 0 in client.state.pulses)
    assert (client.seq, client.resets, client.refused) == (8, 1, None)


def test_another_major_version_is_refused_on_every_side(
    own_hub: HubProcess, other_hub: OtherHub, opened: Opened
) -> None:
    sentence = "the peer has protocol version 2, this side has 1; install the same release on both"
    for endpoint in (own_hub.endpoints.ranks, own_hub.endpoints.clients):
        peer = opened(Peer(endpoint))
        peer.dealer.send(packed(["whatever"], version=2))
        refused = peer.hear(Refused)
        assert isinstance(refused, Refused) and refused.why == sentence
    rank, client = opened(Peer(own_hub.endpoints.ranks)), opened(Peer(own_hub.endpoints.clients))
    # The hub can decode this frame, but it is from a peer with another version.
    rank.say(make_hello(0, 1, version=2))
    client.say(Credit(2, "", 0, 1))
    for peer in (rank, client):
        refused = peer.hear(Refused)
        assert isinstance(refused, Refused) and sentence in refused.why
    agent = opened(Agent(other_hub.endpoints.ranks, lambda: (3, "forward", 0.0)))
    agent.introduce(make_hello(0, 1), None)
    identity, _ = other_hub.hear()
    other_hub.router.send_multipart([identity, packed(["whatever"], version=2)])
    watcher = opened(Client(own_hub.endpoints.clients))
    poll_until(watcher, lambda: agent.refused)
    assert agent.refused == sentence


def test_ranks_of_this_release_cause_no_faults(own_hub: HubProcess, opened: Opened) -> None:
    """The control experiment: ranks of the same release as the hub cause no warning or error events."""
    fleet, client = opened(Fleet(own_hub.endpoints.ranks)), opened(Client(own_hub.endpoints.clients))
    poll_until(client, lambda: len(client.state.steps) == 4, fleet.turn)
    assert isinstance(client.state.steps[0], Step)
    assert not [event for event in client.state.events if event.level != "info"]
