"""The agent without a hub, or with a hub that sends nothing: its queue is bounded, its calls never block, and a command
that arrives twice is applied once.
"""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from agents import protocol
from agents.protocol import (
    Ack,
    Board,
    Command,
    Event,
    Experts,
    Farewell,
    Gone,
    Hello,
    LayerLoad,
    Pulse,
    Step,
    Summary,
    Timeline,
    Welcome,
    codec,
)
from agents.rank.agent import Agent
from agents.rank.hub_link import HubLink
from agents.rank.outbox import BULK, CAPACITY, RECORDS, Outbox
from agents.rank.received_commands import REMEMBERED, REPEATED, ReceivedCommands
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import DEADLINE_S, make_hello, make_step, make_summary


def doing() -> tuple[int, str, float]:
    return 1, "forward", time.monotonic()


def drained(outbox: Outbox) -> list[protocol.AnyMessage]:
    messages: list[protocol.AnyMessage] = []
    while frame := outbox.frame():
        assert len(frame) <= protocol.FRAME_BYTES
        messages += codec.decode(frame)
    return messages


class SilentHub:
    """A stand-in for a hub: a ROUTER socket that receives from one agent and sends only the messages that the test
    passes to it."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/ranks"
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        self._router.bind(self.endpoint)
        self._peer = b""

    def hear(self, *kinds: type[protocol.Message], count: int) -> list[protocol.AnyMessage]:
        """Wait until at least `count` messages of these kinds have arrived, and return them."""
        heard: list[protocol.AnyMessage] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(heard) < count:
            rest_s = deadline - time.monotonic()
            assert rest_s > 0 and self._router.poll(int(1000 * rest_s)), f"{len(heard)} of {count} arrived"
            self._peer, frame = self._router.recv_multipart()
            heard += [message for message in codec.decode(frame) if isinstance(message, kinds)]
        return heard

    def is_silent(self, for_ms: int = 100) -> bool:
        """Whether no frame has arrived after `for_ms` milliseconds."""
        return not self._router.poll(for_ms)

    def say(self, *messages: protocol.Message) -> None:
        self._router.send_multipart([self._peer, codec.encode(messages)])

    def close(self) -> None:
        self._router.close()
        self._context.term()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SilentHub]:
    with closing(SilentHub(tmp_path)) as one:
        yield one


def test_an_absent_hub_takes_no_time_and_no_memory(tmp_path: Path) -> None:
    agent = Agent(f"ipc://{tmp_path}/nobody", doing)
    agent.introduce(make_hello(0, 1), None)
    slow = 0
    for step in range(10_000):
        before = time.perf_counter()
        agent.send(make_step(0, step))
        slow += time.perf_counter() - before > 0.1
    assert slow < 10, "send waited for something"  # a busy machine may pause this process now and then
    assert agent.lost_records >= 10_000 - CAPACITY[RECORDS] - 4000  # one frame may be in transit
    before = time.perf_counter()
    agent.close(0.1)
    assert time.perf_counter() - before < 2
    assert "agent" not in {thread.name for thread in threading.enumerate()}


def test_what_an_agent_could_not_deliver_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(f"ipc://{tmp_path}/nobody", doing)
    agent.introduce(make_hello(3, 4), None)
    agent.send(*(make_step(3, step) for step in range(5)))
    agent.close(0.1)
    assert re.search(r"the last ([67]) records of rank 3 did not reach the hub within 0.1 s", caplog.text)


def test_an_agent_leaves_when_the_hub_has_its_last_records(
    hub: SilentHub, caplog: pytest.LogCaptureFixture
) -> None:
    """The hub is restarted while the rank leaves, so the rank introduces itself again."""
    agent = Agent(hub.endpoint, doing)
    agent.introduce(make_hello(3, 4), None)
    agent.send(make_step(3, 8))
    closing = threading.Thread(target=agent.close, args=(DEADLINE_S,))
    closing.start()
    assert [type(one) for one in hub.hear(Hello, Step, Gone, count=3)] == [Hello, Step, Gone]
    hub.say(Welcome("epoch"))
    assert [type(one) for one in hub.hear(Hello, Gone, count=2)] == [Hello, Gone]
    assert closing.is_alive()
    hub.say(Farewell([3]))
    closing.join(DEADLINE_S / 2)
    assert not closing.is_alive() and caplog.text == ""
    unheard = Agent(hub.endpoint, doing)
    unheard.introduce(make_hello(2, 4), None)
    hub.hear(Hello, count=1)
    unheard.close(0.1)
    assert "rank 2 has left, but its last records may not have reached the hub within 0.1 s" in caplog.text


def test_without_an_endpoint_everything_is_a_no_op() -> None:
    agent = Agent(None, doing)
    agent.introduce(make_hello(0, 1), None)
    agent.send(make_step(0, 1))
    agent.settle(Ack(0, 1, "applied", 1, "d"))
    assert agent.pending is None and agent.refused is None and agent.lost_records == 0
    agent.close()


def test_an_older_board_is_never_queued_after_a_newer_one(
    hub: SilentHub, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub requests a Hello while a change is applied."""
    agent = opened(Agent(hub.endpoint, doing))
    latest = ReceivedCommands.latest_acks

    def apply(revision: int) -> None:
        agent.introduce(make_hello(0, 1, revision=revision), Board(0, revision, "d", []))
        agent.settle(Ack(0, revision, "applied", 1, "d"))

    trainer = threading.Thread(target=apply, args=(2,))

    def meanwhile(orders: ReceivedCommands) -> list[Ack]:
        trainer.start()
        trainer.join(0.2)  # long enough to continue if nothing blocks it
        return latest(orders)

    monkeypatch.setattr(ReceivedCommands, "latest_acks", meanwhile)
    apply(1)
    assert [type(one) for one in hub.hear(Board, Ack, count=2)] == [Board, Ack]
    hub.say(Welcome("epoch"))
    heard = hub.hear(Board, Ack, count=4)
    trainer.join()
    assert [(type(one), one.revision) for one in heard] == [(Board, 1), (Ack, 1), (Board, 2), (Ack, 2)]  # type: ignore[union-attr]


def test_steps_report_lost_records(hub: SilentHub, opened: Opened) -> None:
    agent = opened(Agent(hub.endpoint, doing))
    for step in range(CAPACITY[RECORDS] + 5):  # the agent sends nothing before its introduction
        agent.send(make_step(0, step))
    agent.introduce(make_hello(0, 1), None)
    steps: list[Step] = []
    while not steps or steps[-1].step < CAPACITY[RECORDS] + 4:
        steps += (one for one in hub.hear(Step, count=1) if isinstance(one, Step))
    assert steps[0].step == agent.lost_records >= 5, "a pulse may have displaced one more"
    assert [step.step for step in steps] == list(range(steps[0].step, CAPACITY[RECORDS] + 5))
    assert all(step.seq == step.step + 1 for step in steps) and steps[-1].lost_records == 4


def test_large_vectors_displace_no_records() -> None:
    outbox = Outbox()
    outbox.put(make_step(0, 1))
    for step in range(100):
        outbox.put(Timeline(0, step, 1.0, [protocol.Action("F", 0, 0.0, 1.0)] * 4000))
    outbox.put(Ack(0, 1, "applied", 1, "d"))
    messages = drained(outbox)
    assert [type(message) for message in messages[:2]] == [Ack, Step]
    assert len(messages) == 2 + CAPACITY[BULK] and outbox.lost == 100 - CAPACITY[BULK]


def test_a_message_that_cannot_be_encoded_is_counted_and_reported_once() -> None:
    outbox = Outbox()
    outbox.put(Experts(1, [LayerLoad(0, [2**40] * 4096, 0)] * 8))
    outbox.put(Pulse(0, 1, "forward", object()))  # type: ignore[arg-type]
    outbox.put(Gone(2**70, clean=True))
    outbox.put(make_step(0, 1))
    told, step = drained(outbox)
    assert step == make_step(0, 1) and outbox.lost == 3
    assert isinstance(told, Event) and told.text == outbox.problem
    assert told.text.startswith("a Gone cannot be sent: ")


def test_a_long_text_is_cut_to_the_limit(hub: SilentHub, opened: Opened) -> None:
    agent = opened(Agent(hub.endpoint, doing))
    agent.introduce(make_hello(0, 1), None)
    agent.send(Event(0.0, "error", "rank 0", "x" * 9000))
    (event,) = hub.hear(Event, count=1)
    assert isinstance(event, Event) and len(event.text) == protocol.TEXT


def test_a_jump_of_the_clock_does_not_move_the_time_of_a_summary(
    hub: SilentHub, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = opened(Agent(hub.endpoint, doing))
    began_s = time.time()
    agent.introduce(make_hello(0, 1, began_s=began_s), None)
    monkeypatch.setattr("agents.rank.agent.time.time", lambda: began_s + 3600.0)
    agent.send(make_summary(5))
    (summary,) = hub.hear(Summary, count=1)
    assert isinstance(summary, Summary) and 0.0 <= summary.time_s - began_s < 1800.0


HELLO = make_hello(0, 1, revision=3)


def test_a_command_delivered_twice_is_applied_once() -> None:
    orders = ReceivedCommands()
    command = Command(4, "a", {"micro_batches": 8})
    assert orders.receive(command, HELLO, None) is None
    assert orders.receive(command, HELLO, None) is None
    assert orders.oldest == command
    ack = Ack(0, 4, "rejected", 9, "d", "why")
    orders.settle(ack)
    assert orders.oldest is None
    assert orders.receive(command, HELLO, None) == ack and orders.oldest is None


def test_a_command_covered_by_the_checkpoint_is_not_applied_again() -> None:
    """A process that resumes from a checkpoint remembers no acks, but the checkpoint's revision shows that the command
    was applied."""
    orders = ReceivedCommands()
    ack = orders.receive(Command(3, "a", {}), HELLO, None)
    assert ack is not None and (ack.revision, ack.state) == (3, "applied") and orders.oldest is None


def test_a_command_is_not_acknowledged_while_it_runs() -> None:
    orders = ReceivedCommands()
    orders.receive(Command(4, "a", {}), HELLO, None)
    # The trainer has sent its hello with the new revision, but has not settled the command yet.
    assert orders.receive(Command(4, "a", {}), make_hello(0, 1, revision=4), None) is None
    assert orders.oldest is not None


def test_commands_are_handled_in_order_with_bounded_memory() -> None:
    orders = ReceivedCommands()
    for revision in range(4, 1000):
        orders.receive(Command(revision, "a", {}), HELLO, None)
        if revision > 10:
            oldest = orders.oldest
            assert oldest is not None and oldest.revision == revision - 7
            orders.settle(Ack(0, oldest.revision, "applied", 1, "d"))
    assert orders.receive(Command(992 - REMEMBERED + 1, "a", {}), HELLO, None) is not None
    assert orders.receive(Command(992 - REMEMBERED, "a", {}), HELLO, None) is None, "its ack is forgotten"
    assert len(orders.latest_acks()) == REPEATED and orders.latest_acks()[-1].revision == 992


def test_a_muted_agent_sends_nothing_until_unmuted(hub: SilentHub, opened: Opened) -> None:
    agent = opened(Agent(hub.endpoint, doing))
    agent.introduce(make_hello(0, 1), None)
    agent.mute(True)
    agent.send(make_step(0, 1))
    assert not agent.attached and not agent.wants("peers", 0)
    agent.mute(False)
    agent.send(make_step(0, 2))
    (step,) = hub.hear(Step, count=1)
    assert agent.attached and isinstance(step, Step) and step.step == 2
    agent.mute(True)  # the fixture then closes the muted agent, which must not block


def test_an_error_in_a_turn_is_reported_once_and_the_rank_continues(
    hub: SilentHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0

    def turn(_link: HubLink) -> None:
        nonlocal turns
        turns += 1
        raise RuntimeError("a mistake")

    monkeypatch.setattr(HubLink, "turn", turn)
    monkeypatch.setattr("agents.rank.agent.PAUSE_S", 0.001)
    agent = Agent(hub.endpoint, doing)
    agent.introduce(make_hello(0, 1), None)
    deadline = time.monotonic() + 5
    while turns < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert turns >= 3 and agent.refused is not None and "a mistake" in agent.refused
    agent.close(5.0)
    told, _ = hub.hear(Event, Gone, count=2)
    assert isinstance(told, Event) and "a mistake" in told.text, "once, and then the goodbye"
