"""The relay: it forwards messages to the hub and to the right rank, and no rank can send messages in the name of
another rank."""

import subprocess
import sys
from collections import deque
from typing import cast

import pytest
import zmq
from msgspec import structs

from agents import protocol
from agents.client import Client
from agents.hub.relay.node import WELCOME_S, Node, flush_s
from agents.hub.relay.outbox import KEPT, PATIENCE, RelayOutbox
from agents.hub.telemetry.membership import SUCCESSION_S
from agents.protocol import CHECKPOINT_STEP, Event, Farewell, Gone, Pulse, Refused, Relay, Welcome, codec
from agents.rundir.socket_directory import endpoints_in, make_socket_directory, remove_sockets
from agents.transport.reconnecting import ReconnectingSocket
from agents.transport.roles import Role
from agents.transport.server_sockets import Received, ServerSocket
from agents.waiting import wait_for_command
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import (
    DEADLINE_S,
    Fleet,
    HubProcess,
    Peer,
    environment,
    make_hello,
    make_step,
    make_summary,
    poll_until,
)


class RelayProcess:
    """A relay process for run `r`. Each start uses the same sockets."""

    def __init__(self, hub: str) -> None:
        self._hub = hub
        self.endpoints = endpoints_in(make_socket_directory())
        self.process: subprocess.Popen[str]
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "agents.hub.relay", "--run", "r", "--hub", self._hub]
        self.process = subprocess.Popen(
            [*command, "--sockets", str(self.endpoints.directory)],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout and self.process.stdout.readline().strip() == self.endpoints.ranks

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        assert self.process.stdout
        self.process.stdout.close()
        remove_sockets(self.endpoints)


@pytest.fixture
def relay(own_hub: HubProcess, opened: Opened) -> RelayProcess:
    return opened(RelayProcess(own_hub.endpoints.ranks))


def test_ranks_and_commands_survive_kills_of_relay_and_hub(
    own_hub: HubProcess, relay: RelayProcess, opened: Opened
) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    fleet = opened(Fleet(relay.endpoints.ranks))
    poll_until(client, lambda: len(client.state.steps) == 4 and client.state.board, fleet.turn)
    command = client.propose({"micro_batches": 8})
    poll_until(
        client,
        lambda: command in client.state.commands and client.state.commands[command].settled,
        fleet.turn,
    )
    assert wait_for_command(client, command, 1.0).acks == 4

    relay.kill()
    step = fleet.step
    relay.start()
    poll_until(client, lambda: client.state.steps[3].step > step + 2, fleet.turn)

    epoch = client.epoch
    own_hub.kill()
    own_hub.start()
    # On a machine with a load of 100, Python needed more than 25 s to start.
    poll_until(client, own_hub.listens, fleet.turn)
    poll_until(
        client,
        lambda: client.epoch != epoch and len(client.state.steps) == 4 and client.state.board,
        fleet.turn,
    )
    command = client.propose({"micro_batches": 2})
    poll_until(
        client,
        lambda: command in client.state.commands and client.state.commands[command].settled,
        fleet.turn,
    )
    assert wait_for_command(client, command, 1.0).acks == 4
    fleet.close(DEADLINE_S)
    poll_until(client, lambda: len(client.state.gone) == 4)
    assert all(gone.clean for gone in client.state.gone.values())


def test_a_relay_sends_only_for_ranks_that_sent_a_hello_through_it(
    own_hub: HubProcess, opened: Opened
) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    rank, relay = opened(Peer(own_hub.endpoints.ranks)), opened(Peer(own_hub.endpoints.ranks))
    rank.say(make_hello(0, 4), make_step(0, 7))
    relay.say(Relay(protocol.VERSION, "r", "node", 1), make_hello(1, 4), make_hello(2, 4, layout="other"))
    refused = relay.hear(Refused)
    assert isinstance(refused, Refused) and refused.rank == 2
    relay.say(
        make_step(1, 5),
        make_step(0, 1000),  # sent as a rank that has its own connection
        make_step(3, 1000),  # sent as a rank that has sent no hello
        Event(0.0, "info", "rank 0", "as rank 0"),
        Event(0.0, "info", "rank 1", "as rank 1"),
        Event(0.0, "info", "hub", "as the hub"),
    )
    poll_until(client, lambda: client.epoch)
    assert relay.hear(Welcome) == Welcome(client.epoch, [0, 3])
    poll_until(client, lambda: 1 in client.state.steps and 0 in client.state.steps)
    client.poll(0.1)
    assert {rank: step.step for rank, step in client.state.steps.items()} == {0: 7, 1: 5}
    said = [event.source for event in client.state.events if event.text.startswith("as ")]
    assert said == ["rank 1"]
    relay.say(Relay(protocol.VERSION, "another", "node", 1))
    assert "belongs to run another" in relay.hear(Refused).why  # type: ignore[union-attr]
    rank.say(Relay(protocol.VERSION, "r", "node", 1))
    assert "sent an introduction on the connection of a rank" in rank.hear(Refused).why  # type: ignore[union-attr]


INTRODUCTION = Relay(protocol.VERSION, "r", "h" * 600, 1)


def test_each_frame_with_a_hello_begins_with_the_introduction() -> None:
    """A hub that restarts between two frames would otherwise take the connection for that of one rank."""
    outbox = RelayOutbox(INTRODUCTION)
    sent: list[bytes] = []
    event, hello = Event(0.0, "info", "rank 0", "x" * 500), make_hello(0, 1, layout="x" * 500)
    for events in range(470, 510):  # the hello is once the first message of a frame, and once the last
        for message in (*[event] * events, hello, *[event] * 600):
            outbox.put(message)
        outbox.flush(lambda frame: sent.append(frame) is None)
    assert all(len(frame) <= protocol.FRAME_BYTES for frame in sent)
    frames = [codec.decode(frame) for frame in sent]
    assert sum(hello in frame for frame in frames) == 40
    for frame in frames:
        assert frame[0] == INTRODUCTION or hello not in frame
        assert INTRODUCTION not in frame[1:]
    assert any(frame[0] != INTRODUCTION for frame in frames), "a frame without a hello needs no introduction"


def test_a_full_outbox_keeps_the_newest_record_of_each_rank() -> None:
    outbox = RelayOutbox(INTRODUCTION)
    for step in range(3 * PATIENCE):
        outbox.put(make_step(step % 100, step))
        if step % 1000 == 0:
            outbox.put(Pulse(1, step, "forward", 0.0))
            outbox.put(make_hello(1, 100, step=step))
    assert len(outbox) <= PATIENCE
    assert outbox.flush(lambda _: False) == 0, "nothing was sent, so nothing is reported"
    sent: list[bytes] = []
    lost = outbox.flush(lambda frame: sent.append(frame) is None)
    messages = [message for frame in sent for message in codec.decode(frame) if message != INTRODUCTION]
    assert all(len(frame) <= protocol.FRAME_BYTES for frame in sent)
    newest = {m.rank: m.step for m in messages if isinstance(m, protocol.Step)}
    assert newest == {step % 100: step for step in range(3 * PATIENCE - 100, 3 * PATIENCE)}
    assert sum(isinstance(m, protocol.Hello) for m in messages) == -(-3 * PATIENCE // 1000), (
        "a hello is not a record"
    )
    put = 3 * PATIENCE + 2 * -(-3 * PATIENCE // 1000)
    assert lost == put - len(messages) > 0 and len(messages) < PATIENCE + KEPT


def test_records_of_invalid_ranks_are_bounded_too() -> None:
    outbox = RelayOutbox(INTRODUCTION)
    for rank in range(3 * PATIENCE):
        outbox.put(make_step(rank, 1))
        outbox.put(Event(0.0, "info", "rank 1", "x"))
    assert len(outbox) <= PATIENCE


class RankSide:
    """A fake socket to the ranks that records the relay's answers."""

    def __init__(self) -> None:
        self.said: deque[Received] = deque()
        self.answers: list[tuple[bytes, protocol.AnyMessage]] = []

    def receive(self) -> Received:
        if not self.said:
            raise zmq.Again
        return self.said.popleft()

    def send(self, peer: bytes, frame: bytes) -> bool:
        self.answers += [(peer, message) for message in codec.decode(frame)]
        return True


class HubSide:
    """A fake socket to the hub that records the sent frames."""

    refusal = None

    def __init__(self) -> None:
        self.said: deque[bytes] = deque()
        self.sent: list[protocol.AnyMessage] = []

    @property
    def socket(self) -> "HubSide":
        return self

    def check_handshakes(self) -> None: ...

    def recv(self, _flags: int) -> bytes:
        if not self.said:
            raise zmq.Again
        return self.said.popleft()

    def send(self, frame: bytes, _flags: int) -> None:
        self.sent += codec.decode(frame)


class Within:
    """A relay `Node` with fake sockets: the test passes in messages from ranks and reads the messages that the relay
    sends to the hub."""

    def __init__(self) -> None:
        self.sockets, self._hub = RankSide(), HubSide()
        self._node = Node("r", cast(ReconnectingSocket, self._hub), cast(ServerSocket, self.sockets))
        self._now = 0.0

    def say(self, peer: bytes, *messages: protocol.Message, after_s: float = 0.05) -> None:
        self.sockets.said.append(Received(peer, Role.RANK, "", [codec.encode(messages)]))
        self._turn(after_s)

    def hear(self, *messages: protocol.Message, after_s: float = 0.05) -> None:
        self._hub.said.append(codec.encode(messages))
        self._turn(after_s)

    def _turn(self, after_s: float) -> None:
        self._now += after_s
        self._node.turn(self._now)

    def batch(self) -> list[protocol.AnyMessage]:
        """The messages that the hub received since the last call."""
        batch, self._hub.sent = self._hub.sent, []
        return batch


def test_relays_of_a_large_job_send_records_less_often() -> None:
    """In a job with 512 relays of 8 ranks each, a relay sends step records every 0.125 s and other messages
    immediately."""
    node = Within()
    for rank in range(8):
        node.say(b"p%d" % rank, make_hello(rank, 4096))
    node.say(b"p0", make_step(0, 1), after_s=1.0)
    assert node.batch()[-1] == make_step(0, 1)
    node.say(b"p1", make_step(1, 1))
    node.say(b"p2", make_step(2, 1))
    assert node.batch() == []
    node.say(b"p3", make_step(3, 1))
    assert node.batch() == [make_step(rank, 1) for rank in (1, 2, 3)]
    node.say(b"p4", make_step(4, 1), after_s=0.01)
    assert node.batch() == []
    node.say(b"p5", Event(0.0, "info", "rank 5", "x"), after_s=0.01)
    assert [type(one) for one in node.batch()] == [protocol.Step, Event]


@pytest.mark.parametrize(
    ("world", "ranks", "seconds"),
    [(16, 8, 0.02), (256, 8, 0.02), (4096, 8, 0.125), (16_384, 8, 0.5), (65_536, 8, 0.5), (8, 0, 0.02)],
)
def test_the_interval_between_batches(world: int, ranks: int, seconds: float) -> None:
    assert flush_s(world, ranks) == seconds


def test_a_relay_passes_on_only_allowed_messages() -> None:
    node = Within()
    node.say(b"p0", make_hello(0, 4))
    node.say(b"p3", make_hello(3, 4))
    node.batch()
    node.say(
        b"p3",
        make_summary(9),  # a record of the whole job
        # Because of this message, a hub would refuse the whole batch.
        protocol.Credit(protocol.VERSION, "", 0, 1),
        protocol.Sample(["peers"], 1.0),
        make_step(3, 5),
        make_step(0, 5),
    )
    node.say(b"p0", make_summary(5))
    batch = node.batch()
    assert [one for one in batch if not isinstance(one, Event)] == [make_step(3, 5), make_summary(5)]
    # the first dropped message is reported, and later ones from time to time
    (told,) = (one for one in batch if isinstance(one, Event))
    assert (told.source, told.text) == ("rank 3", "the rank sent a summary, which it may not send; dropped")


@pytest.mark.parametrize("kind", [protocol.Sample(["peers"], 1.0), protocol.Preview("q", {"x": 1})], ids=repr)
def test_messages_of_hubs_and_clients_are_not_passed_on(kind: protocol.Message) -> None:
    node = Within()
    node.say(b"p0", make_hello(0, 4))
    node.say(b"p3", make_hello(3, 4))
    node.batch()
    node.say(b"p3", kind)
    (told,) = node.batch()
    assert isinstance(told, Event) and "which it may not send; dropped" in told.text
    assert node.sockets.answers == [], "nor to the other ranks of the node"


def test_a_restarted_hub_is_answered_with_an_introduction_and_asked_ranks_once_a_second() -> None:
    node = Within()
    for rank in range(2):
        node.say(b"p%d" % rank, make_hello(rank, 2))
    node.batch()
    for _ in range(3):  # the new hub answers each frame of records so
        node.hear(Welcome("e"))
    assert node.sockets.answers == [(b"p0", Welcome("e")), (b"p1", Welcome("e"))]
    node.say(b"p1", make_hello(1, 2))
    assert [type(one) for one in node.batch()] == [Relay, protocol.Hello]
    node.hear(Welcome("e", [0]))  # rank 1 is known by now
    assert node.sockets.answers[2:] == [(b"p0", Welcome("e"))]
    node.hear(Welcome("e"), after_s=WELCOME_S)
    assert len(node.sockets.answers) == 5


def test_a_rank_that_leaves_gets_the_farewell_of_the_hub() -> None:
    node = Within()
    for rank in (0, 3):
        node.say(b"p%d" % rank, make_hello(rank, 4), Gone(rank, clean=True))
    assert [one.rank for one in node.batch() if isinstance(one, Gone)] == [0, 3]
    node.hear(Farewell([3, 7]))
    node.hear(Farewell([3]))
    assert node.sockets.answers == [(b"p3", Farewell([3]))]


def test_an_event_keeps_every_field_but_its_source() -> None:
    """Also fields that are added later: each field of the event has a value that is not the default."""
    node = Within()
    node.say(b"p3", make_hello(3, 4))
    node.batch()
    event = Event(5.0, "warning", "loop", "saved", {CHECKPOINT_STEP: 7})
    defaults = {field.name: field.default for field in structs.fields(Event)}
    assert all(getattr(event, name) != default for name, default in defaults.items())
    node.say(b"p3", event)
    assert node.batch() == [structs.replace(event, source="rank 3")]


def test_a_request_to_one_rank_reaches_only_that_rank() -> None:
    node = Within()
    for rank in range(4):
        node.say(f"p{rank}".encode(), make_hello(rank, 8))
    wanted = protocol.Sample(["experts"], 10.0, [3], 4)
    node.hear(wanted, protocol.Sample(["peers"], 10.0, [7]))  # rank 7 is on another node
    assert node.sockets.answers == [(b"p3", wanted)]


def test_the_number_of_a_connected_rank_cannot_be_taken() -> None:
    node = Within()
    node.say(b"p3", make_hello(3, 4))
    node.say(b"x", make_hello(3, 4, pid=1), make_step(3, 1000))
    assert [(peer, type(answer)) for peer, answer in node.sockets.answers] == [(b"x", Refused)]
    node.say(b"p3", make_step(3, 5))
    assert make_step(3, 5) in (batch := node.batch()) and make_step(3, 1000) not in batch
    node.say(b"x", make_hello(3, 4, pid=1), make_step(3, 6), after_s=SUCCESSION_S)
    assert make_step(3, 6) in node.batch()


def test_a_relay_reports_malformed_messages() -> None:
    node = Within()
    bad = make_hello(0, 4, coords={"x" * 70: 1})
    node.say(b"p", bad)
    ((_, answer),) = node.sockets.answers
    assert isinstance(answer, Refused) and "not a frame of this protocol" in answer.why
    node.say(b"p", make_hello(0, 4), bad, bad)
    told = [event for event in node.batch() if isinstance(event, Event)]
    assert len(told) == 1 and "an invalid hello" in told[0].text and told[0].source == "rank 0"


def test_stack_queries_reach_the_ranks_that_are_asked_and_their_answers_the_hub() -> None:
    node = Within()
    for rank in (0, 3):
        node.say(b"p%d" % rank, make_hello(rank, 4))
    node.batch()
    query = protocol.StackQuery("q", [3, 7])
    node.hear(query)
    assert node.sockets.answers == [(b"p3", query)]
    own, foreign = (protocol.RankStacks(rank, "q", 1, "", 0.0, []) for rank in (3, 0))
    node.say(b"p3", own, foreign)
    assert [one for one in node.batch() if not isinstance(one, Event)] == [own]
