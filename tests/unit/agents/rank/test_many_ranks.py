"""Many ranks behind one connection: hellos, the bounded queue, commands, sampling requests, preview queries, silent
ranks."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agents.protocol import (
    PREVIEWS,
    Ack,
    Board,
    Command,
    Farewell,
    Gone,
    Hello,
    Preview,
    Previewed,
    Refused,
    Relay,
    Sample,
    Step,
    Welcome,
    codec,
)
from agents.rank import many_ranks
from agents.rank.many_ranks import ACKS_REPEATED, FRAMES_QUEUED, ManyRanks
from agents.rank.sampling import EVERY
from tests.unit.agents.fleet import DEADLINE_S, make_board, make_hello, make_step
from tests.unit.agents.rank.test_agent import SilentHub

WORLD = 4


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SilentHub]:
    with closing(SilentHub(tmp_path)) as one:
        yield one


@pytest.fixture
def ranks(hub: SilentHub) -> Iterator[ManyRanks]:
    with closing(ManyRanks("r", hub.endpoint)) as many:
        yield many


def board(revision: int = 0) -> Board:
    made = make_board()
    return Board(0, revision, made.digest(), made.states())


def introduce(ranks: ManyRanks, world: int = WORLD) -> None:
    ranks.introduce([make_hello(rank, world) for rank in range(world)], board())


def turn_until(ranks: ManyRanks, true: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        ranks.turn(0.01)


def sent(ranks: ManyRanks) -> None:
    """Call `turn` until all queued frames are sent."""
    turn_until(ranks, lambda: not ranks.queued)


def test_all_ranks_are_introduced_behind_one_relay(
    hub: SilentHub, ranks: ManyRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_ranks, "HELLO_PAUSE_S", 0.0)
    ranks.preview = lambda changes: Previewed("", changes, 0)
    introduce(ranks)
    sent(ranks)
    first, *rest = hub.hear(Relay, Hello, Board, count=WORLD + 2)
    assert isinstance(first, Relay) and first.run == "r"
    hellos = [one for one in rest if isinstance(one, Hello)]
    assert [one.rank for one in hellos] == list(range(WORLD)) and isinstance(rest[-1], Board)
    assert all(one.age_s is not None and one.age_s >= 0 for one in hellos)
    assert [PREVIEWS in one.capabilities for one in hellos] == [True, False, False, False]
    hub.say(Welcome("e", ranks=[2]))  # the hub asks one rank for its hello again
    turn_until(ranks, lambda: ranks.queued or not hub.is_silent(1))
    sent(ranks)
    introduction, again = hub.hear(Relay, Hello, Board, count=2)
    assert introduction == first, "the hub may have restarted since it asked"
    assert isinstance(again, Hello) and again.rank == 2


def test_repeated_requests_for_one_hello_are_answered_once(
    hub: SilentHub, ranks: ManyRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_ranks, "HELLO_PAUSE_S", 60.0)  # longer than this test takes on a busy machine
    introduce(ranks)
    sent(ranks)
    hub.hear(Hello, count=WORLD)
    hub.say(*[Welcome("e", ranks=[2])] * 3, Refused("told to stop"))
    turn_until(ranks, lambda: ranks.refused)
    sent(ranks)
    assert hub.is_silent(), "rank 2 sent its hello just before"
    monkeypatch.setattr(many_ranks, "HELLO_PAUSE_S", 0.0)
    hub.say(Welcome("e", ranks=[2]))
    turn_until(ranks, lambda: not hub.is_silent())
    assert [one.rank for one in hub.hear(Hello, count=1) if isinstance(one, Hello)] == [2]


def test_each_frame_of_hellos_begins_with_the_introduction(hub: SilentHub, ranks: ManyRanks) -> None:
    introduce(ranks, 8192)
    frames = ranks.queued
    assert frames > 2
    sent(ranks)
    for _ in range(frames):
        introduction, *hellos = hub.hear(Relay, Hello, count=1)  # all messages of one frame
        assert isinstance(introduction, Relay)
        assert hellos and all(isinstance(one, Hello) for one in hellos)


def test_a_request_for_all_hellos_is_answered_once_a_second(
    hub: SilentHub, ranks: ManyRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    introduce(ranks)
    sent(ranks)
    hub.hear(Hello, count=WORLD)
    hub.say(*[Welcome("e")] * 3, Refused("told to stop"))
    turn_until(ranks, lambda: ranks.refused)
    sent(ranks)
    hub.hear(Hello, count=WORLD)
    assert hub.is_silent(), "the second and the third request were answered too"
    monkeypatch.setattr(many_ranks, "INTRODUCED_PAUSE_S", 0.0)
    hub.say(Welcome("e"))
    turn_until(ranks, lambda: not hub.is_silent())
    hub.hear(Relay, Hello, count=WORLD + 1)
    assert ranks.refused == "told to stop"


def test_a_full_queue_drops_its_oldest_frames(tmp_path: Path) -> None:
    with closing(ManyRanks("r", f"ipc://{tmp_path}/nobody")) as ranks:
        for step in range(FRAMES_QUEUED + 7):
            ranks.send([make_step(0, step)])
        assert (ranks.queued, ranks.lost_frames) == (FRAMES_QUEUED, 7)
        began = time.monotonic()
        ranks.close(0.05)
        assert time.monotonic() - began < DEADLINE_S / 2 and not ranks.attached
        ranks.close()


def test_a_full_queue_keeps_the_introduction(tmp_path: Path) -> None:
    """A hub that starts slowly, on a busy machine, would otherwise get records of ranks that it does not know."""
    endpoint = f"ipc://{tmp_path}/ranks"
    with closing(ManyRanks("r", endpoint)) as ranks:
        introduce(ranks)
        for step in range(FRAMES_QUEUED + 7):
            ranks.send([make_step(0, step)])
        assert ranks.queued == FRAMES_QUEUED
        with closing(SilentHub(tmp_path)) as hub:
            turn_until(ranks, lambda: ranks.queued < FRAMES_QUEUED)
            first = [type(one) for one in hub.hear(Relay, Hello, Step, count=WORLD + 2)]
            assert first[: WORLD + 1] == [Relay, *[Hello] * WORLD]
            ranks.close(0.1)


def test_many_ranks_leave_when_the_hub_has_their_last_records(
    hub: SilentHub, ranks: ManyRanks, caplog: pytest.LogCaptureFixture
) -> None:
    introduce(ranks)
    ranks.send(Gone(rank, clean=True) for rank in range(WORLD))
    sent(ranks)
    hub.hear(Gone, count=WORLD)
    hub.say(Farewell([0, 1, 3]))
    ranks.close(0.5)
    assert "the hub did not take the last records of 1 ranks within 0.5 s" in caplog.text


def test_a_command_is_pending_until_it_is_settled_and_its_acks_are_repeated(
    hub: SilentHub, ranks: ManyRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_ranks, "HELLO_PAUSE_S", 0.0)
    introduce(ranks)
    sent(ranks)
    hub.hear(Hello, count=WORLD)
    for revision in range(1, ACKS_REPEATED + 2):
        hub.say(Command(revision, f"c{revision}", {"micro_batches": 8}))
        turn_until(ranks, lambda: ranks.pending)
        assert ranks.pending and ranks.pending.revision == revision
        ranks.settle([Ack(rank, revision, "applied", 5, "d") for rank in range(WORLD)])
        assert ranks.pending is None
        sent(ranks)
        acks = hub.hear(Ack, count=WORLD)
        assert [ack.rank for ack in acks if isinstance(ack, Ack)] == list(range(WORLD))
    hub.say(Command(2, "c2", {"micro_batches": 8}))  # sent again, because the leader's ack was lost
    turn_until(ranks, lambda: not hub.is_silent(1))
    (known,) = hub.hear(Ack, count=1)
    assert isinstance(known, Ack) and (known.rank, known.revision) == (0, 2) and ranks.pending is None
    hub.say(Welcome("e2", ranks=[3]))  # a restarted hub
    turn_until(ranks, lambda: not hub.is_silent(1))
    acks = [ack for ack in hub.hear(Ack, count=ACKS_REPEATED) if isinstance(ack, Ack)]
    assert [(ack.rank, ack.revision) for ack in acks] == [(3, n) for n in range(2, ACKS_REPEATED + 2)]


def test_silent_ranks_send_no_hello_and_no_ack(hub: SilentHub, ranks: ManyRanks) -> None:
    ranks.silence({1, 2})
    introduce(ranks)
    ranks.settle([Ack(rank, 1, "applied", 0, "d") for rank in range(WORLD)])
    sent(ranks)
    heard = hub.hear(Hello, Ack, count=4)
    assert [one.rank for one in heard if isinstance(one, Hello)] == [0, 3]
    assert [one.rank for one in heard if isinstance(one, Ack)] == [0, 3]
    ranks.silence({1})
    sent(ranks)
    back = hub.hear(Hello, Ack, count=2)
    assert [type(one) for one in back] == [Hello, Ack] and {one.rank for one in back} == {2}  # type: ignore[union-attr]


def test_peers_are_due_where_they_are_requested(
    hub: SilentHub, ranks: ManyRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    introduce(ranks)
    sent(ranks)
    hub.hear(Hello, count=WORLD)
    assert ranks.peers_wanted(EVERY) == list(range(WORLD)) and ranks.peers_wanted(EVERY + 1) == []
    hub.say(Sample(["peers"], 60.0, [1, 3], 4))
    turn_until(ranks, lambda: ranks.peers_wanted(4))
    assert ranks.peers_wanted(4) == [1, 3] and ranks.peers_wanted(5) == []
    ranks.silence({3})
    assert ranks.peers_wanted(8) == [1] and ranks.peers_wanted(EVERY) == [0, 1, 2]
    monkeypatch.setattr(many_ranks, "UNASKED", WORLD - 1)
    assert ranks.peers_wanted(EVERY) == [1], "too many ranks to send without a request"
    hub.say(Sample(["peers"], 0.0, [1], 4))
    turn_until(ranks, lambda: not ranks.peers_wanted(4))


def test_a_preview_is_answered_even_if_it_fails(hub: SilentHub, ranks: ManyRanks) -> None:
    introduce(ranks)
    sent(ranks)
    hub.hear(Hello, count=WORLD)

    def answer(id: str) -> Previewed:
        hub.say(Preview(id, {"micro_batches": 8}))
        turn_until(ranks, lambda: not hub.is_silent(1))
        (heard,) = hub.hear(Previewed, count=1)
        assert isinstance(heard, Previewed) and heard.id == id
        return heard

    assert answer("a").why == "this run does not answer preview queries"

    def failing(_: object) -> Previewed:
        raise ValueError("no such layout")

    ranks.preview = failing
    assert "no such layout" in answer("b").why
    ranks.preview = lambda changes: Previewed("other", changes, 3)
    assert answer("c").why == "" and answer("d").changes == {"micro_batches": 8}


def test_without_an_endpoint_nothing_is_sent() -> None:
    ranks = ManyRanks("r", None)
    introduce(ranks)
    ranks.send([make_step(0, 1)])
    ranks.send_frame(codec.encode([make_step(0, 1)]))
    ranks.turn()
    assert not ranks.attached and (ranks.queued, ranks.lost_frames) == (0, 0)
    assert not ranks.wants("experts", 0)
    ranks.close()
