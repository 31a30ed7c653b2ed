"""Agents, a hub process and clients together, over real sockets."""

import json
import os
import signal
import socket
import time

import msgpack
import pytest

from agents import protocol
from agents.client import Client
from agents.protocol import (
    Ack,
    Board,
    Credit,
    Event,
    Gone,
    Peers,
    Propose,
    Pulse,
    Refused,
    Summary,
    ToPeer,
    Updates,
    Welcome,
)
from agents.rundir import runs
from agents.waiting import wait_for_command
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import (
    Fleet,
    HubProcess,
    Peer,
    make_hello,
    make_step,
    make_summary,
    poll_until,
)


@pytest.fixture
def client(hub: HubProcess, fleet: Fleet, opened: Opened) -> Client:
    """A client that has received a hello from each of the four simulated ranks, and the leader's `Board` message, which
    lists the tunable settings (knobs) with their current and legal values."""
    client = opened(Client(hub.endpoints.clients))
    poll_until(client, lambda: len(client.state.hellos) == 4 and client.state.board, fleet.turn)
    return client


def test_a_late_client_gets_a_snapshot_and_then_every_step(client: Client, fleet: Fleet) -> None:
    assert client.resets == 1 and client.refused is None
    first = fleet.step + 1
    seen = poll_until(
        client, lambda: client.state.summaries and client.state.summaries[-1].step >= first + 20, fleet.turn
    )
    steps = [update.step for update in seen if isinstance(update, Summary) and update.step >= first]
    assert steps == list(range(first, steps[-1] + 1)), "no gap and no repeat"
    assert client.resets == 1 and client.state.world == 4
    poll_until(client, lambda: len(client.state.pulses) == 4)
    assert client.state.pulses[1].doing == "forward"
    poll_until(client, lambda: client.age_s is not None and client.age_s < 2)


def test_a_proposal_is_applied_on_all_ranks(client: Client, fleet: Fleet) -> None:
    board = client.state.board
    assert board is not None
    to = 2 if fleet.boards[0].values["micro_batches"] == 8 else 8
    id = client.propose({"micro_batches": to, "recompute": "full"}, base_revision=board.revision)
    poll_until(client, lambda: id in client.state.commands and client.state.commands[id].settled, fleet.turn)
    command = wait_for_command(client, id, 1.0)
    assert (command.state, command.acks, command.world) == ("applied", 4, 4)
    assert command.before["micro_batches"] != to and command.who.endswith(f":{os.getpid()}")
    assert command.applied_step is not None and command.applied_step <= fleet.step
    poll_until(client, lambda: client.state.board and client.state.board.revision == command.revision)
    assert fleet.boards[3].values["micro_batches"] == to


def test_an_illegal_value_names_the_legal_ones(client: Client) -> None:
    refused = wait_for_command(client, client.propose({"micro_batches": 3}), 5.0)
    assert (refused.state, refused.revision) == ("rejected", 0)
    assert refused.why == "micro_batches = 3 is not legal; legal: 1, 2, 4, 8"


def test_two_operators_with_one_base(client: Client, hub: HubProcess, fleet: Fleet, opened: Opened) -> None:
    other = opened(Client(hub.endpoints.clients))
    poll_until(other, lambda: other.state.board)
    base = fleet.boards[0].revision
    ids = [one.propose({"recompute": "none"}, base_revision=base) for one in (client, other)]
    states = [
        wait_for_command(one, id, 5.0, settled=False) for one, id in zip((client, other), ids, strict=True)
    ]
    assert sorted(state.state for state in states) == ["accepted", "rejected"]
    assert "another change to revision" in next(state.why for state in states if state.state == "rejected")
    known = client.state.commands
    poll_until(client, lambda: any(id in known and known[id].state == "applied" for id in ids), fleet.turn)
    stale = wait_for_command(client, client.propose({"recompute": "none"}, base_revision=base), 5.0)
    assert stale.why == f"the board has changed: revision {fleet.boards[0].revision}, not {base}"


def test_the_same_id_twice_asks_once(client: Client, fleet: Fleet) -> None:
    id = client.propose({"micro_batches": 4}, id="mine")
    poll_until(client, lambda: id in client.state.commands and client.state.commands[id].settled, fleet.turn)
    known = client.state.commands[id]
    carried_out = list(fleet.carried_out)
    client.propose({"micro_batches": 1}, id="mine")
    client.poll(0.1)
    for _ in range(5):
        fleet.turn()
        client.poll(0.05)
    assert client.state.commands[id].changes == known.changes == {"micro_batches": 4}
    assert fleet.carried_out == carried_out


def test_an_unencodable_request_is_a_value_error(client: Client) -> None:
    with pytest.raises(ValueError, match="not a frame of this protocol"):
        client.propose({"x" * 65: 1})


# ------------------------------------------------------------------------------------------- invalid messages


def test_malformed_frames_at_both_sockets_affect_nobody(
    client: Client, hub: HubProcess, fleet: Fleet, opened: Opened
) -> None:
    for endpoint in (hub.endpoints.ranks, hub.endpoints.clients):
        path = endpoint.removeprefix("ipc://")
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\x01\x00" * 50, os.urandom(10_000)):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(path)
                raw.sendall(garbage)
        peer = opened(Peer(endpoint))
        peer.dealer.send(b"\x91" * 60_000)
        refused = peer.hear(Refused)
        assert isinstance(refused, Refused) and "not a frame of this protocol" in refused.why
        peer.dealer.send(msgpack.packb([7, []]))
        assert "protocol version 7, this side has 1" in peer.hear(Refused).why  # type: ignore[union-attr]
        peer.dealer.send_multipart([b"one", b"two"])
        assert "has one frame, and this one has 2" in peer.hear(Refused).why  # type: ignore[union-attr]
        peer.dealer.send(b"\x00" * (protocol.MAX_FRAME_BYTES + 1))  # libzmq closes the connection
    step = fleet.step
    poll_until(client, lambda: client.state.summaries[-1].step > step + 3, fleet.turn)
    peer_faults = [event for event in client.state.events if "frame that was dropped" in event.text]
    assert 1 <= len(peer_faults) <= 3, "an event, but not one each"
    assert client.resets == 1 and hub.process.poll() is None


def test_a_client_cannot_act_as_a_rank(hub: HubProcess, opened: Opened) -> None:
    peer = opened(Peer(hub.endpoints.clients))
    peer.say(make_step(0, 1))
    assert "a client may send credit and proposals" in peer.hear(Refused).why  # type: ignore[union-attr]
    peer.say(Credit(9, "", 0, 1))
    assert "protocol version 9" in peer.hear(Refused).why  # type: ignore[union-attr]


def test_an_unknown_rank_gets_a_welcome_or_a_refusal(hub: HubProcess, client: Client, opened: Opened) -> None:
    peer = opened(Peer(hub.endpoints.ranks))
    peer.say(make_step(0, 1_000_000))
    assert peer.hear(Welcome) == Welcome(client.epoch)
    peer.say(make_hello(2**24, 2**24))
    assert "is not legal" in peer.hear(Refused).why  # type: ignore[union-attr]
    peer.say(make_hello(1, 4, layout="another"))
    assert "give all ranks the same layout" in peer.hear(Refused).why  # type: ignore[union-attr]
    client.poll(0.1)
    assert client.state.steps[0].step < 1_000_000 and client.state.world == 4


def test_a_rank_may_send_only_valid_records_of_its_own(own_hub: HubProcess, opened: Opened) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    peer = opened(Peer(own_hub.endpoints.ranks))
    peer.say(
        make_hello(1, 4),
        make_step(0, 5),
        make_summary(5),
        Board(1, 9, "d", []),
        Pulse(1, 5, "x", float("nan")),
        Peers(1, 5, [ToPeer(9999, 1)]),
        Propose("a", {}),
        Event(0.0, "error", "hub", "I am the hub"),
        Ack(1, 77, "applied", 1, "d"),
        make_step(1, 6),
    )
    poll_until(client, lambda: 1 in client.state.steps)
    state = client.state
    assert list(state.steps) == [1] and not state.summaries and not state.pulses and state.board is None
    texts = {event.text for event in state.events if event.source == "hub"}
    assert "rank 1 sent a step on behalf of rank 0; dropped" in texts
    assert "rank 1 sent to ranks that this run does not have; dropped" in texts and not state.peers
    assert any(text.startswith("rank 1 sent an invalid pulse: a number that is not finite") for text in texts)
    assert "rank 1 sent a propose, which ranks may not send; dropped" in texts
    assert [event.source for event in state.events if event.text == "I am the hub"] == ["rank 1"]


# ----------------------------------------------------------------------------------------------- loss and end


def test_a_silent_rank_is_lost_and_returns(own_hub: HubProcess, opened: Opened) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    rank, other = opened(Peer(own_hub.endpoints.ranks)), opened(Peer(own_hub.endpoints.ranks))
    rank.say(make_hello(0, 2))
    other.say(make_hello(1, 2))

    def keep_one_alive() -> None:
        other.say(Pulse(1, 1, "forward", 1.0))

    poll_until(client, lambda: client.state.gone, keep_one_alive)
    assert list(client.state.gone) == [0] and not client.state.gone[0].clean
    rank.say(Pulse(0, 1, "forward", 1.0))
    poll_until(client, lambda: not client.state.gone)
    rank.say(Gone(0, clean=True))
    poll_until(client, lambda: client.state.gone)
    assert client.state.gone[0].clean
    rank.say(Pulse(0, 1, "forward", 1.0))
    rank.hear(Welcome)


def test_a_hub_ends_cleanly(own_hub: HubProcess, opened: Opened) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    fleet = opened(Fleet(own_hub.endpoints.ranks, 2))
    poll_until(client, lambda: client.state.board, fleet.turn)
    found = runs.newest_live(own_hub.folder.parent)
    assert found is not None and found.hub is not None
    assert (found.hub.epoch, found.hub.pid) == (client.epoch, own_hub.process.pid)
    shown = json.loads((own_hub.folder / "hub.json").read_text())
    assert shown["endpoints"]["clients"] == own_hub.endpoints.clients
    own_hub.process.send_signal(signal.SIGINT)  # the hub ignores Ctrl-C, because the launcher handles it
    fleet.turn()
    last = fleet.step
    time.sleep(0.2)
    assert own_hub.stop() == 0
    poll_until(client, lambda: client.state.events and client.state.events[-1].text == "the hub has ended")
    assert client.state.summaries[-1].step == last
    assert runs.newest_live(own_hub.folder.parent) is None
    assert not own_hub.endpoints.directory.exists() and not (own_hub.folder / "hub.json").exists()


def test_frames_to_a_client_are_never_too_large(hub: HubProcess, client: Client, opened: Opened) -> None:
    peer = opened(Peer(hub.endpoints.clients))
    peer.say(Credit(protocol.VERSION, "", 0, 64))
    updates = peer.hear(Updates)
    assert isinstance(updates, Updates) and updates.begins and updates.epoch == client.epoch


def test_a_low_bandwidth_client_can_still_steer(hub: HubProcess, fleet: Fleet, opened: Opened) -> None:
    client, newest = opened(Client(hub.endpoints.clients)), opened(Client(hub.endpoints.clients))
    client.set_subscription(10.0, ranks=False, frame_bytes=4096)
    newest.set_subscription(20.0)
    for one in (client, newest):
        poll_until(one, lambda one=one: one.state.summaries and len(one.state.hellos) == 4, fleet.turn)
    assert client.state.board and not client.state.steps and not client.state.pulses
    id = client.propose({"recompute": "none"})
    poll_until(client, lambda: id in client.state.commands and client.state.commands[id].settled, fleet.turn)
    poll_until(newest, lambda: len(newest.state.steps) == 4 and id in newest.state.commands, fleet.turn)
    step = fleet.step
    poll_until(client, lambda: client.state.summaries[-1].step > step + 5, fleet.turn)
    poll_until(newest, lambda: newest.state.steps[3].step > step + 5, fleet.turn)
    assert not client.state.steps and client.resets == newest.resets == 1


def test_the_viewers_socket_only_watches(hub: HubProcess, fleet: Fleet, opened: Opened) -> None:
    viewer = opened(Client(hub.endpoints.viewers))
    poll_until(viewer, lambda: viewer.state.board and viewer.state.summaries, fleet.turn)
    revision = viewer.state.board.revision if viewer.state.board else None
    asked = viewer.propose({"micro_batches": 2})
    poll_until(viewer, lambda: asked in viewer.denied, fleet.turn)
    assert viewer.denied[asked] == "this connection only watches; changes require the role operator"
    for _ in range(20):
        fleet.turn()
        viewer.poll(0.01)
    assert (
        viewer.state.board and viewer.state.board.revision == revision and asked not in viewer.state.commands
    )
