"""The client with a hub controlled by the test: gaps, repeated updates, lost frames, no frames."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from agents import client as client_module
from agents import requests
from agents.client import Client, whoami
from agents.protocol import (
    CommandState,
    Credit,
    Decide,
    Event,
    Gone,
    Message,
    Propose,
    Refused,
    TrialState,
    Try,
    Update,
    Updates,
    codec,
)
from agents.waiting import wait_for_command


class ScriptedHub:
    """A ROUTER socket that a test reads from and writes to."""

    def __init__(self, path: Path) -> None:
        self.endpoint = f"ipc://{path}/hub"
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.set(zmq.LINGER, 0)
        self.router.bind(self.endpoint)
        self.peer = b""

    def hear(self) -> Message:
        assert self.router.poll(3000), "the client sent nothing"
        self.peer, frame = self.router.recv_multipart()
        (message,) = codec.decode(frame)
        return message

    def say(self, *messages: Message) -> None:
        self.router.send_multipart([self.peer, codec.encode(messages)])

    def live(self, seq: int, *updates: Update, epoch: str = "e") -> None:
        self.say(Updates(epoch, seq, list(updates)))

    def snapshot(self, seq: int, *updates: Update, epoch: str = "e") -> None:
        """The frames of a snapshot, one per update."""
        for place, update in enumerate(updates):
            self.say(Updates(epoch, seq, [update], begins=place == 0, snapshot=len(updates) - place))

    def close(self) -> None:
        self.router.close()
        self.context.term()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ScriptedHub]:
    hub = ScriptedHub(tmp_path)
    yield hub
    hub.close()


@pytest.fixture
def client(hub: ScriptedHub) -> Iterator[Client]:
    """A client that has received update 10 of epoch `e` and all earlier updates."""
    client = Client(hub.endpoint)
    client.poll(0)
    credit = hub.hear()
    assert isinstance(credit, Credit) and (credit.epoch, credit.seq) == ("", 0)
    hub.snapshot(10, event(0), event(1))
    assert len(client.poll(2)) == 2 and (client.epoch, client.seq, client.resets) == ("e", 10, 1)
    yield client
    client.close()


def event(number: int) -> Event:
    return Event(float(number), "info", "hub", str(number))


def numbers(client: Client) -> list[int]:
    return [int(known.text) for known in client.state.events]


def asks_for_a_snapshot(hub: ScriptedHub) -> bool:
    credit = hub.hear()
    return isinstance(credit, Credit) and (credit.epoch, credit.seq) == ("", 0)


def test_updates_that_follow_on_are_applied(hub: ScriptedHub, client: Client) -> None:
    hub.live(12, event(2), event(3))
    assert client.poll(2) == [event(2), event(3)]
    assert (client.seq, client.resets, numbers(client)) == (12, 1, [0, 1, 2, 3])


def test_a_repeated_update_is_applied_once(hub: ScriptedHub, client: Client) -> None:
    hub.live(12, event(2), event(3))
    hub.live(13, event(2), event(3), event(4))
    hub.live(11, event(2))
    client.poll(2)
    client.poll(0.1)
    assert (client.seq, client.resets, numbers(client)) == (13, 1, [0, 1, 2, 3, 4])


def test_a_client_knows_that_older_changes_are_in_transit(hub: ScriptedHub, client: Client) -> None:
    # the newest values in three frames; only the last advances the number
    for number, seq in (
        (2, 10),
        (3, 10),
    ):
        hub.say(Updates("e", seq, [event(number)], since=10))
        client.poll(2)
        hub.live(10)  # a heartbeat between them changes nothing
        client.poll(0.05)
        assert client.behind_s > 0
    hub.say(Updates("e", 30, [event(4)], since=10))
    client.poll(2)
    assert client.behind_s == 0.0 and numbers(client) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("seq", "epoch"), [(13, "e"), (11, "another start")], ids=["gap", "new epoch"])
def test_an_update_after_a_gap_is_not_applied(hub: ScriptedHub, client: Client, seq: int, epoch: str) -> None:
    hub.live(seq, event(5), epoch=epoch)
    assert client.poll(0.1) == [] and numbers(client) == [0, 1]
    assert asks_for_a_snapshot(hub)
    hub.live(14, event(6), epoch=epoch)  # sent before the hub received the request
    hub.snapshot(20, event(8), event(9), epoch=epoch)
    assert client.poll(2) == [event(8), event(9)]
    assert (client.epoch, client.seq, client.resets, numbers(client)) == (epoch, 20, 2, [8, 9])


def test_a_snapshot_with_a_frame_missing_changes_nothing(hub: ScriptedHub, client: Client) -> None:
    hub.say(Updates("e", 20, [event(8)], begins=True, snapshot=3))
    client.poll(0.1)
    assert client.loading == (1, 3)
    hub.say(Updates("e", 20, [event(9)], snapshot=1))
    assert client.poll(0.1) == [] and numbers(client) == [0, 1]
    assert asks_for_a_snapshot(hub)
    hub.snapshot(21, event(8), event(9), event(10))
    client.poll(2)
    assert numbers(client) == [8, 9, 10]


def test_credit_is_granted_again_when_used_up(hub: ScriptedHub, client: Client) -> None:
    for number in range(client_module.FRAMES - 2):  # two frames of the credit were used for the snapshot
        hub.live(11 + number, event(number))
    while client.seq < 8 + client_module.FRAMES:
        client.poll(1)
    credit = hub.hear()
    assert isinstance(credit, Credit) and (credit.epoch, credit.seq) == ("e", client.seq)


def test_a_silent_hub_gets_the_request_again(
    hub: ScriptedHub, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SILENCE_S", 0.2)
    assert client.poll(0.5) == []
    credit = hub.hear()
    assert isinstance(credit, Credit) and (credit.epoch, credit.seq) == ("e", 10)
    assert client.age_s is not None and client.age_s > 0.2


def test_a_proposal_is_repeated_until_it_is_answered(
    hub: ScriptedHub, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "RESEND_S", 0.1)
    id = client.propose({"lr": 0.1}, base_revision=3, expires_step=9, id="mine")
    client.poll(0.3)
    heard = [hub.hear() for _ in range(2)]
    assert heard == [Propose("mine", {"lr": 0.1}, 3, 9, whoami())] * 2
    with pytest.raises(TimeoutError, match="did not answer the proposal"):
        wait_for_command(client, id, 0.0)
    hub.live(11, CommandState(id, 4, "accepted", {"lr": 0.1}, {}, "", 0.0, world=2))
    assert wait_for_command(client, id, 2.0, settled=False).revision == 4
    with pytest.raises(TimeoutError, match="revision 4 was accepted, but no rank has applied it"):
        wait_for_command(client, id, 0.0)
    while hub.router.poll(0):
        hub.hear()
    client.poll(0.3)
    assert not hub.router.poll(0), "it is answered, so it is not asked again"


def test_a_refusal_shows_until_a_snapshot_comes(hub: ScriptedHub, client: Client) -> None:
    hub.say(Refused("not you"))
    client.poll(0.1)
    assert client.refused == "not you"
    hub.snapshot(30, Gone(1, clean=True))
    client.poll(2)
    assert client.refused is None and client.resets == 2


def test_a_foreign_frame_is_reported(hub: ScriptedHub, client: Client) -> None:
    hub.router.send_multipart([hub.peer, b"\x92\x07\x90"])
    client.poll(0.1)
    assert client.refused is not None and "protocol version 7" in client.refused


def test_a_client_without_a_hub(tmp_path: Path) -> None:
    client = Client(f"ipc://{tmp_path}/nobody")
    assert client.poll(0.05) == [] and client.age_s is None and client.resets == 0
    with pytest.raises(TimeoutError, match="no hub answered at ipc://"):
        wait_for_command(client, client.propose({"lr": 1}), 0.05)
    client.close()


def test_a_refused_request_is_sent_once(
    hub: ScriptedHub, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "RESEND_S", 0.1)
    id = client.propose({"lr": 0.1})
    client.poll(0.02)
    hub.say(Refused("you only watch", request_id=id))
    denied = wait_for_command(client, id, 2.0)
    assert (denied.state, denied.why) == ("rejected", "you only watch")
    while hub.router.poll(0):
        hub.hear()
    client.poll(0.3)
    assert not hub.router.poll(0)


def test_a_decision_on_a_trial_is_repeated_for_a_while(
    hub: ScriptedHub, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "RESEND_S", 0.1)
    monkeypatch.setitem(requests.REPEATED_S, Decide, 0.3)
    with pytest.raises(ValueError, match="no trial is running"):
        client.decide("", keep=True)
    client.state.apply(TrialState("t", "after", {"lr": 1}, {}, 4, "", 0.0, True, 0.0))
    client.decide("", keep=False, who="me")
    client.decide("gone", keep=False, who="me")
    client.start_trial({"lr": 2}, 4, id="t")
    client.poll(0.5)
    sent: list[Message] = []
    while hub.router.poll(0):
        sent.append(hub.hear())
    decided = [message.id for message in sent if isinstance(message, Decide)]
    assert decided.count("t") > 1 and decided.count("gone") > 1, "a decision without an answer is repeated"
    assert not any(isinstance(message, Try) for message in sent), "the trial is known already"
    client.poll(0.3)
    assert not hub.router.poll(0)
