"""The update log: its sequence numbers, its limits, and the frames that each client receives."""

import pytest
from msgspec import structs

from agents import protocol
from agents.hub.telemetry.latest import Latest
from agents.hub.telemetry.subscribers import (
    CLIENTS,
    FORGOTTEN_AFTER_S,
    FRAMES_PER_ROUND,
    HEARTBEAT_S,
    Subscribers,
)
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Credit, Event, Updates, WireError, codec
from agents.state.run_state import RunState
from tests.unit.agents.fleet import make_hello, make_step


class Wire:
    """A fake socket that records the frames sent by `Subscribers`. `open`: whether the socket accepts frames."""

    def __init__(self) -> None:
        self.open = True
        self.frames: list[tuple[bytes, Updates]] = []

    def send(self, identity: bytes, frame: bytes) -> bool:
        if self.open:
            (updates,) = codec.decode(frame)
            assert isinstance(updates, Updates) and len(frame) <= protocol.FRAME_BYTES
            self.frames.append((identity, updates))
        return self.open

    def take(self) -> list[Updates]:
        taken, self.frames = [updates for _, updates in self.frames], []
        return taken


@pytest.fixture
def update_log() -> UpdateLog:
    return UpdateLog(log_updates=100, log_bytes=1 << 20)


def text(number: int, size: int = 10) -> Event:
    return Event(0.0, "info", "hub", f"{number:>{size}}")


def test_live_updates_follow_a_snapshot_without_gap_or_repeat(update_log: UpdateLog) -> None:
    sent = Wire()
    subscribers = Subscribers(update_log, sent.send)
    update_log.publish(make_hello(0, 2))
    subscribers.credit(b"c", Credit(1, "", 0, 16), 0.0)
    subscribers.serve(0.0)
    (snapshot,) = sent.take()
    assert (snapshot.begins, snapshot.snapshot, snapshot.seq) == (True, 1, 1)
    for step in (1, 2, 3):
        update_log.publish(make_step(0, step))
    subscribers.serve(0.1)
    (live,) = sent.take()
    assert (live.seq, live.snapshot, [u.step for u in live.updates]) == (4, 0, [1, 2, 3])  # type: ignore[union-attr]


def test_a_large_snapshot_comes_in_frames_as_credit_allows(update_log: UpdateLog) -> None:
    for number in range(1000):
        update_log.publish(text(number, 4000))
    sent = Wire()
    subscribers = Subscribers(update_log, sent.send)
    state = RunState()
    counted: list[int] = []
    for _ in range(20):
        subscribers.credit(b"c", Credit(1, "", 0, 2), 0.0)
        subscribers.serve(0.0)
        frames = sent.take()
        assert len(frames) <= 2
        for frame in frames:
            counted.append(frame.snapshot)
            for update in frame.updates:
                state.apply(update)
        if counted[-1] == 1:
            break
    assert counted == list(range(len(counted), 0, -1)) and len(counted) > 10
    assert vars(state) == vars(update_log.state)


def test_late_clients_get_latest_values_and_new_clients_a_snapshot(
    update_log: UpdateLog,
) -> None:
    sent = Wire()
    subscribers = Subscribers(update_log, sent.send)
    for number in range(3000):
        update_log.publish(make_step(number % 2, number))
    assert update_log.holds(update_log.epoch, 2999) and not update_log.holds(update_log.epoch, 1)
    assert not update_log.holds("another epoch", 2999) and not update_log.holds(update_log.epoch, 3001)
    for epoch, seq, numbers in (
        (update_log.epoch, 2999, [2999]),
        (update_log.epoch, 1, [2998, 2999]),
        ("another", 1, [2998, 2999]),
    ):
        subscribers.credit(b"c", Credit(1, epoch, seq, 4), 0.0)
        subscribers.serve(0.0)
        (frame,) = sent.take()
        assert sorted(update.step for update in frame.updates) == numbers  # type: ignore[union-attr]
        assert (bool(frame.snapshot), frame.since) == (
            epoch == "another",
            1 if numbers == [2998, 2999] and epoch != "another" else None,
        )
        assert frame.seq == 3000


def test_the_log_is_bounded_by_bytes_too(update_log: UpdateLog) -> None:
    for number in range(1000):
        update_log.publish(text(number, 4000))
    oldest = next(seq for seq in range(1001) if update_log.holds(update_log.epoch, seq))
    assert 0 < oldest < update_log.seq
    assert sum(map(len, update_log.after(oldest))) <= 1 << 20


def test_credit_waits_for_updates_and_is_answered_with_a_heartbeat(update_log: UpdateLog) -> None:
    sent = Wire()
    subscribers = Subscribers(update_log, sent.send)
    subscribers.credit(b"c", Credit(1, update_log.epoch, 0, 4), 0.0)
    subscribers.serve(0.5)
    assert sent.take() == []
    subscribers.serve(HEARTBEAT_S)
    (beat,) = sent.take()
    assert (beat.updates, beat.snapshot, beat.seq) == ([], 0, 0)


def test_a_stalled_client_affects_only_itself(update_log: UpdateLog) -> None:
    sent = Wire()
    subscribers = Subscribers(update_log, sent.send)
    for identity in (b"stalled", b"quick"):
        subscribers.credit(identity, Credit(1, update_log.epoch, 0, 1), 0.0)
    for number in range(50):
        update_log.publish(text(number))
        subscribers.serve(0.0)
        subscribers.credit(b"quick", Credit(1, update_log.epoch, number + 1, 1), 0.0)
    assert [identity for identity, _ in sent.frames].count(b"stalled") == 1
    assert [identity for identity, _ in sent.frames].count(b"quick") == 50


def test_a_client_with_a_full_queue_continues_from_its_own_position(update_log: UpdateLog) -> None:
    sent = Wire()
    subscribers = Subscribers(update_log, sent.send)
    subscribers.credit(b"c", Credit(1, update_log.epoch, 0, 8), 0.0)
    update_log.publish(text(1))
    sent.open = False
    subscribers.serve(0.0)
    sent.open = True
    subscribers.serve(0.0)
    assert sent.take() == []
    subscribers.credit(b"c", Credit(1, update_log.epoch, 0, 8), 0.0)
    subscribers.serve(0.0)
    assert [len(frame.updates) for frame in sent.take()] == [1]


def test_one_client_gets_a_bounded_share_of_a_round() -> None:
    update_log = UpdateLog()
    for number in range(1500):
        update_log.publish(text(number, 4000))
    sent = Wire()
    subscribers = Subscribers(update_log, sent.send)
    subscribers.credit(b"c", Credit(1, update_log.epoch, 0, 64), 0.0)
    assert subscribers.serve(0.0) is True
    assert len(sent.take()) == FRAMES_PER_ROUND


def test_clients_are_bounded_and_silent_ones_forgotten(update_log: UpdateLog) -> None:
    subscribers = Subscribers(update_log, Wire().send)
    for number in range(CLIENTS):
        assert subscribers.credit(bytes([number]), Credit(1, "", 0, 1), 0.0) is None
    assert "already serves" in (subscribers.credit(b"one more", Credit(1, "", 0, 1), 0.0) or "")
    subscribers.serve(FORGOTTEN_AFTER_S + 1)
    assert len(subscribers) == 0


def test_an_update_too_large_for_a_frame_takes_no_number(update_log: UpdateLog) -> None:
    with pytest.raises(WireError):
        update_log.publish(protocol.Experts(1, [protocol.LayerLoad(0, [2**40] * 4096, 0)] * 8))
    assert update_log.seq == 0


# -------------------------------------------------------------------------------------------- latest values only


def skimmed(records: list[protocol.Step]) -> codec.Skimmed:
    found = codec.skim(codec.encode(records))
    assert found is not None
    return found


@pytest.fixture
def many() -> UpdateLog:
    """An update log with ten steps of each of 64 ranks, and 30 events."""
    update_log = UpdateLog()
    for rank in range(64):
        update_log.publish(make_hello(rank, 64, facts={"model": "x" * 200}))
    for step in range(10):
        update_log.publish_records(skimmed([make_step(rank, step) for rank in range(64)]))
        for number in range(3):
            update_log.publish(text(10 * step + number))
    return update_log


def follow(
    subscribers: Subscribers, sent: Wire, state: RunState, request: Credit, now: float
) -> list[Updates]:
    subscribers.credit(b"c", request, now)
    subscribers.serve(now)
    frames = sent.take()
    for frame in frames:
        for update in frame.updates:
            state.apply(update)
    return frames


def test_a_latest_only_client_gets_each_value_once_at_its_rate(many: UpdateLog) -> None:
    sent, state = Wire(), RunState()
    subscribers = Subscribers(many, sent.send)
    (snapshot,) = follow(subscribers, sent, state, Credit(1, "", 0, 8, hz=2.0), 0.0)
    for step in (10, 11, 12):
        many.publish_records(skimmed([make_step(rank, step) for rank in range(64)]))
        many.publish(text(step))
    (frame,) = follow(subscribers, sent, state, Credit(1, many.epoch, snapshot.seq, 8, hz=2.0), 0.1)
    assert (frame.since, frame.seq, len(frame.updates)) == (snapshot.seq, many.seq, 64 + 3)
    many.newest.read()
    assert vars(state) == vars(many.state)
    many.publish_records(skimmed([make_step(0, 13)]))
    assert follow(subscribers, sent, state, Credit(1, many.epoch, frame.seq, 8, hz=2.0), 0.5) == []
    (frame,) = follow(subscribers, sent, state, Credit(1, many.epoch, frame.seq, 8, hz=2.0), 0.7)
    assert [update.step for update in frame.updates] == [13]  # type: ignore[union-attr]


def test_a_frame_budget_splits_a_pass_without_loss(many: UpdateLog) -> None:
    sent, state = Wire(), RunState()
    subscribers = Subscribers(many, sent.send)
    request = Credit(1, "", 0, 64, hz=1.0, frame_bytes=2000)
    (snapshot,) = follow(subscribers, sent, state, request, 0.0)
    seq, now, laps, largest = snapshot.seq, 0.0, 0, 0
    for step in range(10, 60):  # the newest values must be sent, not those at the start of the pass
        many.publish_records(skimmed([make_step(rank, step) for rank in range(64)]))
        now += 1.01
        frames = follow(
            subscribers, sent, state, Credit(1, many.epoch, seq, 64, hz=1.0, frame_bytes=2000), now
        )
        assert len(frames) == 1, "one a second"
        largest = max(largest, sum(len(codec.pack(update)) for update in frames[0].updates))
        laps += frames[0].seq > seq
        seq = frames[0].seq
        assert all(u.step >= step - 1 for u in frames[0].updates if isinstance(u, protocol.Step))
    assert 3 <= laps < 50 and largest <= 2000
    assert min(known.step for known in state.steps.values()) >= 60 - 50 / laps * 2


def test_a_client_without_ranks_gets_only_job_records(many: UpdateLog) -> None:
    sent, state = Wire(), RunState()
    subscribers = Subscribers(many, sent.send)
    (snapshot,) = follow(subscribers, sent, state, Credit(1, "", 0, 8, ranks=False), 0.0)
    assert not state.steps and len(state.hellos) == 64 and len(state.events) == 30
    assert [rank for rank, hello in state.hellos.items() if hello.facts] == [0]
    many.publish_records(skimmed([make_step(rank, 10) for rank in range(64)]))
    many.publish(protocol.Experts(10, []))
    many.publish(text(1))
    (frame,) = follow(subscribers, sent, state, Credit(1, many.epoch, snapshot.seq, 8, ranks=False), 0.1)
    assert [type(update).__name__ for update in frame.updates] == ["Event"] and frame.seq == many.seq


def test_kept_updates_are_bounded_and_late_clients_get_a_snapshot() -> None:
    state = RunState()
    newest = Latest(state, updates=10)
    for number in range(1, 31):
        newest.add(number, text(number), b"packed")
    assert newest.reaches == 20 and len(list(newest.after(20))) == 10


def test_ranks_that_start_again_leave_no_records_behind() -> None:
    log = UpdateLog()
    for rank in range(4):
        log.publish(make_hello(rank, 4))
        log.publish(make_step(rank, 1))
    log.publish_records(skimmed([make_step(rank, 2) for rank in range(4)]))
    for rank in range(2):
        log.publish(structs.replace(make_hello(rank, 2), restarts=1))
    log.publish(make_step(0, 3))
    late = [codec.decode(codec.updates_frame("e", 1, [one]))[0] for one in log.newest.after(0)]
    state = RunState()
    for frame in late:
        assert isinstance(frame, Updates)
        state.apply(frame.updates[0])
    for one in (state, log.state):
        assert (one.world, one.restarts, sorted(one.hellos), sorted(one.steps)) == (2, 1, [0, 1], [0])
    log.state.apply(make_hello(2, 3))  # a new launcher, which counts restarts from 0 again
    assert (log.state.world, log.state.restarts, sorted(log.state.hellos)) == (3, 0, [2])


def test_a_client_with_a_rate_gets_the_end_of_the_run_at_once() -> None:
    """The hub serves its clients once more when it ends; a client that asked for a frame a second is not due then."""
    for frame_bytes in (0, 4096):
        update_log, sent = UpdateLog(), Wire()
        subscribers = Subscribers(update_log, sent.send)
        update_log.publish(make_hello(0, 1))
        subscribers.credit(b"c", Credit(1, "", 0, 64, 1.0, False, frame_bytes), 0.0)
        subscribers.serve(0.0)
        update_log.publish(text(1))
        subscribers.serve(1.0)
        update_log.publish(text(2))
        sent.take()
        assert not subscribers.serve(1.01) and not sent.frames
        subscribers.end()
        while subscribers.serve(1.02):
            pass
        assert [update for updates in sent.take() for update in updates.updates] == [text(2)]
