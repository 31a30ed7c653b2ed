"""What one peer may cost a hub and everybody on it: its share, and no more."""

import time
from pathlib import Path

import pytest
import zmq

from agents import wire
from agents.hub.audience import CLIENTS, CLIENTS_OF_A_KEY, WATCHING, Audience
from agents.hub.complaints import Complaints
from agents.hub.control import Control
from agents.hub.doors import Came, Door, Doors
from agents.hub.hub import FRAMES_A_ROUND, Hub
from agents.hub.intake import EVENTS_A_SECOND, HELLOS_A_SECOND, Intake
from agents.hub.journal import Journal
from agents.hub.newest import Newest
from agents.hub.questions import Questions
from agents.hub.roster import Roster
from agents.hub.sequence import Sequence
from agents.reach import runs
from agents.reach.keys import Role
from agents.state import RunState
from agents.wire import Credit, Event, Message, Refused, codec
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import HubProcess, Peer, make_hello, make_step


def test_a_client_cannot_send_more_than_one_has_to_say(hub: HubProcess, opened: Opened) -> None:
    peer = opened(Peer(hub.endpoints.clients))
    credit = Credit(wire.VERSION, "", 0, 1)
    peer.dealer.send(codec.frame([codec.pack(credit)] * 20_000))
    assert "at most 65536 bytes" in peer.hear(Refused).why  # type: ignore[union-attr]
    peer.say(*[credit] * 65)
    assert "at most 64 messages" in peer.hear(Refused).why  # type: ignore[union-attr]


def test_a_socket_has_a_share_of_the_hubs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flooded(Door):
        def __init__(self) -> None:
            pass

        def receive(self) -> Came:
            return Came(b"c", Role.OPERATOR, "", [b""])

    def slowly(_came: Came) -> list[Message]:
        time.sleep(0.002)
        return []

    hub = Hub("r", tmp_path, runs.endpoints_in(runs.make_socket_directory()))
    monkeypatch.setattr(hub, "_take", slowly)
    assert 1 <= hub._drain(Flooded()) <= 6 < FRAMES_A_ROUND
    hub.stop()
    hub.run()


def test_news_is_bounded_by_bytes_too() -> None:
    newest = Newest(RunState(), news_bytes=100)
    for number in range(1, 21):
        newest.add(number, Event(0.0, "info", "rank 0", str(number)), 10)
    assert newest.reaches == 10
    assert [event.text for event in newest.after(10) if isinstance(event, Event)] == [
        str(number) for number in range(11, 21)
    ]


class Taken:
    """An intake by itself, and what it publishes."""

    def __init__(self, tmp_path: Path, log_bytes: int = 1 << 20) -> None:
        self.sequence = Sequence(log_bytes=log_bytes)
        roster = Roster("r")
        self.journal = Journal(tmp_path / "run.db")
        control = Control(self.sequence, roster, self.journal)
        questions = Questions(self.sequence, roster, lambda _peer, _message: None)
        self.intake = Intake(self.sequence, roster, control, Complaints(self.sequence), questions)

    def take(self, peer: bytes, *messages: wire.AnyMessage, size: int = 100, now: float = 0.0) -> None:
        self.intake.take(peer, list(messages), size, now)
        self.intake.flush()

    def close(self) -> None:
        self.journal.close()


def test_frames_that_hold_nothing_do_not_empty_the_log(tmp_path: Path, opened: Opened) -> None:
    taken = opened(Taken(tmp_path))
    taken.take(b"a", make_hello(0, 4), make_step(0, 1))
    for _ in range(40):
        taken.take(b"a stranger", make_step(1, 1), size=1 << 20)
    taken.take(b"a", make_step(0, 2))
    assert taken.sequence.holds(taken.sequence.epoch, 0)


def test_a_rank_that_says_the_same_all_the_time_is_not_repeated(tmp_path: Path, opened: Opened) -> None:
    taken = opened(Taken(tmp_path))
    before = taken.sequence.seq
    for _ in range(500):
        taken.take(b"a", make_hello(0, 4))
        taken.take(b"a", Event(0.0, "info", "rank 0", "again"))
    published = taken.sequence.seq - before
    assert HELLOS_A_SECOND + EVENTS_A_SECOND <= published <= HELLOS_A_SECOND + EVENTS_A_SECOND + 2
    taken.take(b"a", make_hello(0, 4, step=9), now=1.0)
    assert taken.sequence.state.hellos[0].step == 9


def test_one_key_does_not_keep_others_out_nor_watchers_who_steers() -> None:
    audience = Audience(Sequence(), lambda _peer, _frame: True)

    def come(number: int, key: str, watches: bool) -> str | None:
        name = f"{key}{number}".encode()
        return audience.credit(name, Credit(wire.VERSION, "", 0, 1), 0.0, key, watches)

    refused = [come(number, "one", True) for number in range(CLIENTS)]
    assert refused.count(None) == CLIENTS_OF_A_KEY and "under the key one" in (refused[-1] or "")
    for key in range(WATCHING):
        come(0, f"key-{key}", True)
    assert len(audience) == WATCHING and "only watch" in (come(1, "another", True) or "")
    assert come(0, "who-steers", False) is None and come(0, "", False) is None


def test_a_socket_that_is_there_is_not_bound_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[str] = []
    really = Door.bind

    def bind(door: Door, url: str) -> str:
        bound.append(url)
        return really(door, url)

    monkeypatch.setattr(Door, "bind", bind)
    endpoints = runs.endpoints_in(runs.make_socket_directory())
    with zmq.Context() as context:
        doors = Doors(context, endpoints)
        endpoints.paths[0].unlink()
        bound.clear()
        doors.bind_again()
        assert bound == [endpoints.ranks] and endpoints.paths[0].exists()
        doors.close()
    runs.remove_sockets(endpoints)
