"""Limits that prevent one peer from overloading the hub or delaying its other peers."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from msgspec import structs

from agents import protocol
from agents.hub.commands.control import Control
from agents.hub.commands.journal import Journal
from agents.hub.commands.preview_queries import PreviewQueries
from agents.hub.commands.stack_queries import StackQueries
from agents.hub.ingest import EVENTS_A_SECOND, HELLOS_A_SECOND, LARGE_WORLD, Ingest
from agents.hub.received_frames import FRAMES_PER_ROUND, ReceivedFrames
from agents.hub.server import IDLE_MS, Hub
from agents.hub.telemetry.latest import Latest
from agents.hub.telemetry.membership import Membership
from agents.hub.telemetry.peer_faults import PeerFaults
from agents.hub.telemetry.subscribers import CLIENTS, CLIENTS_PER_KEY, VIEWERS, Subscribers
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Credit, Event, Refused, Update, Updates, codec
from agents.rundir.socket_directory import endpoints_in, make_socket_directory, remove_sockets
from agents.state.run_state import RunState
from agents.transport.roles import Role
from agents.transport.server_sockets import Received, ServerSocket, ServerSockets
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import DEADLINE_S, HubProcess, Peer, make_hello, make_step, make_summary


def test_a_client_frame_has_a_message_limit(hub: HubProcess, opened: Opened) -> None:
    peer = opened(Peer(hub.endpoints.clients))
    credit = Credit(protocol.VERSION, "", 0, 1)
    peer.dealer.send(codec.frame([codec.pack(credit)] * 20_000))
    assert "at most 65536 bytes" in peer.hear(Refused).why  # type: ignore[union-attr]
    peer.say(*[credit] * 65)
    assert "at most 64 messages" in peer.hear(Refused).why  # type: ignore[union-attr]


def test_each_socket_has_a_time_limit_per_round(tmp_path: Path, opened: Opened) -> None:
    class Flooded(ServerSocket):
        def __init__(self) -> None:
            pass

        def receive(self) -> Received:
            time.sleep(0.002)
            return Received(b"r", Role.RANK, "", [codec.encode([])])

    taken = opened(IngestAlone(tmp_path))
    unused: Any = None
    frames = ReceivedFrames(unused, taken.ingest, unused, PeerFaults(taken.update_log))
    assert 1 <= frames.drain(Flooded(), 0.0) <= 6 < FRAMES_PER_ROUND


def test_repeated_snapshot_requests_are_rate_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """For clients that already had a snapshot, the hub builds at most one per second. A new client gets a new snapshot
    immediately.
    """
    update_log = UpdateLog()
    built: list[int] = []
    all_of = Latest.all

    def counted(newest: Latest, ranks: bool = True) -> Iterator[Update]:
        built.append(update_log.seq)
        return all_of(newest, ranks)

    monkeypatch.setattr(Latest, "all", counted)
    seen: dict[bytes, list[Updates]] = {name: [] for name in (b"a", b"b", b"late")}

    def send(identity: bytes, frame: bytes) -> bool:
        seen[identity] += (one for one in codec.decode(frame) if isinstance(one, Updates))
        return True

    subscribers = Subscribers(update_log, send)
    for tenth in range(50):
        now = 100.0 + tenth / 10
        update_log.publish(make_step(0, tenth))
        for identity in (b"a", b"b"):
            subscribers.credit(identity, Credit(1, "", 0, 64), now)
        subscribers.serve(now)
    assert [sum(frame.begins for frame in seen[who]) for who in (b"a", b"b")] == [5, 5]
    assert len(built) == 5
    update_log.publish(make_step(0, 50))
    subscribers.credit(b"late", Credit(1, "", 0, 64), 104.95)
    assert not subscribers.serve(104.95), "the hub does not wake up early for a client that has to wait"
    (newest,) = seen[b"late"]
    assert newest.begins and newest.seq == update_log.seq
    # A client that requests no further snapshot receives the updates after its last snapshot.
    subscribers.credit(b"a", Credit(1, "", 0, 64), 106.0)
    subscribers.serve(106.0)
    subscribers.serve(106.1)
    assert seen[b"a"][-1].seq == update_log.seq


def test_frames_for_a_slow_peer_are_bounded_and_block_nobody(opened: Opened) -> None:
    """The number of frames queued for a peer is bounded, even if the peer does not read or has left. A real client
    limits this queue: it tells the hub how many more frames it can receive (`Credit`).
    """
    endpoints = endpoints_in(make_socket_directory())
    with zmq.Context() as context:
        server_socket = ServerSocket(context, b"c", Role.OPERATOR)
        server_socket.bind(endpoints.clients)
        peer = opened(Peer(endpoints.clients))
        peer.dealer.set(zmq.RCVHWM, 1)  # takes effect with the next connection
        peer.dealer.disconnect(endpoints.clients)
        peer.dealer.connect(endpoints.clients)
        try:
            peer.say(Credit(protocol.VERSION, "", 0, 1))
            assert server_socket.socket.poll(int(1000 * DEADLINE_S))
            came = server_socket.receive()
            sent = 0
            while server_socket.send(came.peer, bytes(protocol.FRAME_BYTES)) and sent < 400:
                sent += 1
            assert 0 < sent < 400
            peer.close()
            assert not server_socket.send(b"cnobody of that name", b"")
        finally:
            server_socket.socket.close(0)
    remove_sockets(endpoints)


def test_early_updates_are_served_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the hub wakes up less than `FLUSH_MS` after it last sent updates to its clients, it sends none yet, and next
    sleeps for `FLUSH_MS`, not for `IDLE_MS`.
    """
    waits: list[float] = []
    early_ms = 1e12  # each round is early

    class Woken(zmq.Poller):
        def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
            waits.append(timeout or 0)
            if len(waits) == 3:
                hub.stop()
            return []

    monkeypatch.setattr("agents.hub.server.FLUSH_MS", early_ms)
    hub = Hub("r", tmp_path, endpoints_in(make_socket_directory()))
    with monkeypatch.context() as woken:
        woken.setattr(zmq, "Poller", Woken)
        hub.run()
    assert waits == [IDLE_MS, early_ms, early_ms]


def test_kept_updates_are_bounded_by_bytes_too() -> None:
    newest = Latest(RunState(), updates_bytes=100)
    for number in range(1, 21):
        newest.add(number, Event(0.0, "info", "rank 0", str(number)), bytes([number]) * 10)
    assert newest.reaches == 10
    assert list(newest.after(10)) == [bytes([number]) * 10 for number in range(11, 21)]


class IngestAlone:
    """An `Ingest` without sockets, and the update log to which it publishes."""

    def __init__(self, tmp_path: Path, log_bytes: int = 1 << 20) -> None:
        self.update_log = UpdateLog(log_bytes=log_bytes)
        self.membership = membership = Membership("r")
        self.journal = Journal(tmp_path / "run.db")
        control = Control(self.update_log, membership, self.journal)
        questions = PreviewQueries(self.update_log, membership, lambda _peer, _message: None)
        stacks = StackQueries(self.update_log, membership, lambda _peer, _frame: None)
        faults = PeerFaults(self.update_log)
        self.ingest = Ingest(self.update_log, membership, control, faults, questions, stacks)

    def take(self, peer: bytes, *messages: protocol.AnyMessage, now: float = 0.0) -> None:
        self.take_frame(peer, codec.encode(messages), now)

    def take_frame(self, peer: bytes, frame: bytes, now: float = 0.0) -> None:
        if not self.ingest.take_records(peer, frame, now):
            self.ingest.take(peer, codec.decode_each(frame), now)
        self.ingest.flush()

    def close(self) -> None:
        self.journal.close()


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_a_summary_of_a_rank_with_a_wrong_clock_gets_the_time_of_this_machine(
    tmp_path: Path, opened: Opened, ahead_s: float
) -> None:
    """Clients subtract the start of the leader, which is converted too."""
    taken = opened(IngestAlone(tmp_path))
    began_s = time.time() - 30.0 + ahead_s
    taken.take(b"a", make_hello(1, 2, leader=True, began_s=began_s, age_s=30.0))
    taken.take(b"a", structs.replace(make_summary(5), time_s=began_s + 23.0))
    state = taken.update_log.state
    lasted_s = state.summaries[-1].time_s - state.hellos[1].began_s
    assert lasted_s == pytest.approx(23.0)


def test_empty_frames_do_not_empty_the_log(tmp_path: Path, opened: Opened) -> None:
    taken = opened(IngestAlone(tmp_path))
    taken.take(b"a", make_hello(0, 4), make_step(0, 1))
    for _ in range(40):
        taken.take(b"a stranger", *[make_step(1, 1)] * 1000)
        taken.ingest.take_records(b"a", codec.encode([]), 0.0)
    taken.take(b"a", make_step(0, 2))
    assert taken.update_log.holds(taken.update_log.epoch, 0)


def test_ranks_that_return_together_are_one_event(tmp_path: Path, opened: Opened) -> None:
    taken = opened(IngestAlone(tmp_path))
    for rank in range(6):
        taken.take(bytes([rank]), make_hello(rank, 6))
    assert len(taken.membership.newly_lost(1e6)) == 6
    for rank in range(6):
        taken.take(bytes([rank]), make_step(rank, 1), now=1e6)
    taken.ingest.report_heard_again()
    taken.ingest.report_heard_again()
    texts = [event.text for event in taken.update_log.state.events]
    assert texts == ["ranks 0, 1, 2, 3 and 2 more send again"]


def test_a_kept_record_does_not_keep_its_frame_alive(tmp_path: Path, opened: Opened) -> None:
    taken = opened(IngestAlone(tmp_path))
    taken.take(b"a", make_hello(0, LARGE_WORLD))
    padded = [*msgspec.msgpack.decode(codec.pack(make_step(0, 7))), *[None] * 16, "x" * 100_000]
    frame = msgspec.msgpack.encode([protocol.VERSION, [padded]])
    assert codec.skim(frame) is None
    taken.ingest.take(b"a", codec.decode_each(frame), 0.0)
    assert taken.update_log.state.steps[0] == make_step(0, 7)
    assert len(taken.update_log.after(taken.update_log.seq - 1)[0]) < 1000


def test_a_record_is_decoded_on_first_read(tmp_path: Path, opened: Opened) -> None:
    taken = opened(IngestAlone(tmp_path))
    taken.take(b"a", make_hello(0, LARGE_WORLD), make_step(0, 1))
    whole = codec.pack(make_step(0, 2))
    fields = msgspec.msgpack.decode(codec.pack(make_step(0, 3)))
    fields[5] = 2.0**1023 * 1.5  # `step_ms`, above the maximum of a duration
    taken.take_frame(b"a", codec.frame([whole]))
    assert taken.update_log.state.steps[0].step == 1, "no record was read yet"
    taken.update_log.newest.read()
    assert taken.update_log.state.steps[0].step == 2
    taken.take_frame(b"a", msgspec.msgpack.encode([protocol.VERSION, [fields]]))
    first = taken.update_log.seq
    taken.update_log.newest.read()
    taken.ingest.report_malformed()
    assert taken.update_log.state.steps[0].step == 2, "a malformed record displaces no other"
    assert "rank 0 sent an invalid step" in taken.update_log.state.events[-1].text
    # A client that receives every update gets an update with this number, which says that the record could not be read.
    (_, frame), *_ = taken.update_log.frames_after(first - 1)
    (updates,) = codec.decode(frame)
    assert isinstance(updates, protocol.Updates)
    malformed, event = updates.updates
    assert isinstance(malformed, protocol.Unknown) and "not finite" in malformed.why
    assert isinstance(event, Event)


def test_repeated_events_of_a_rank_are_rate_limited(tmp_path: Path, opened: Opened) -> None:
    taken = opened(IngestAlone(tmp_path))
    before = taken.update_log.seq
    for _ in range(500):
        taken.take(b"a", make_hello(0, 4))
        taken.take(b"a", Event(0.0, "info", "rank 0", "again"))
    published = taken.update_log.seq - before
    assert HELLOS_A_SECOND + EVENTS_A_SECOND <= published <= HELLOS_A_SECOND + EVENTS_A_SECOND + 2
    taken.take(b"a", make_hello(0, 4, step=9), now=1.0)
    assert taken.update_log.state.hellos[0].step == 9


def test_one_key_cannot_take_all_places_and_viewers_leave_room() -> None:
    subscribers = Subscribers(UpdateLog(), lambda _peer, _frame: True)

    def come(number: int, key: str, watches: bool) -> str | None:
        name = f"{key}{number}".encode()
        return subscribers.credit(name, Credit(protocol.VERSION, "", 0, 1), 0.0, key, watches)

    refused = [come(number, "one", True) for number in range(CLIENTS)]
    assert refused.count(None) == CLIENTS_PER_KEY and "under the key one" in (refused[-1] or "")
    for key in range(VIEWERS):
        come(0, f"key-{key}", True)
    assert len(subscribers) == VIEWERS and "role viewer" in (come(1, "another", True) or "")
    assert come(0, "who-steers", False) is None and come(0, "", False) is None


def test_an_existing_socket_is_not_bound_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[str] = []
    really = ServerSocket.bind

    def bind(server_socket: ServerSocket, url: str) -> str:
        bound.append(url)
        return really(server_socket, url)

    monkeypatch.setattr(ServerSocket, "bind", bind)
    endpoints = endpoints_in(make_socket_directory())
    with zmq.Context() as context:
        sockets = ServerSockets(context, endpoints)
        endpoints.paths[0].unlink()
        bound.clear()
        sockets.bind_again()
        assert bound == [endpoints.ranks] and endpoints.paths[0].exists()
        sockets.close()
    remove_sockets(endpoints)
