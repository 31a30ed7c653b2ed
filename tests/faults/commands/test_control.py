"""Faults 3, 9 and 15 to 18 of docs/evidence/faults.md: a command is applied once, on all ranks or on none, and the
reported result is correct."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.client import Client
from agents.protocol import Ack, Command, CommandState, Propose, Pulse, Welcome
from agents.protocol import Board as BoardMessage
from agents.waiting import wait_for_command
from tests.faults.commands.test_vote import paired_board
from tests.faults.conftest import Opened
from tests.faults.scaled import Constants, program
from tests.unit.agents.fleet import Fleet, HubProcess, Peer, make_board, make_hello, poll_until

SOON: Constants = {"agents.hub.telemetry.membership.LOST_AFTER_S": 0.6}


@pytest.fixture
def hasty_hub(tmp_path: Path) -> Iterator[HubProcess]:
    """A hub that immediately reports a silent rank as lost."""
    hub = HubProcess(tmp_path / "run")
    hub.program = program("agents.hub.process", SOON)
    hub.start()
    yield hub
    hub.clean_up()


def settled(client: Client, fleet: Fleet, id: str) -> CommandState:
    def done() -> bool:
        return id in client.state.commands and client.state.commands[id].settled

    poll_until(client, done, fleet.turn)
    return client.state.commands[id]


def known(client: Client, fleet: Fleet) -> None:
    poll_until(client, lambda: client.state.board and len(client.state.hellos) == 4, fleet.turn)


# ------------------------------------------------------------------------- 3, 9: killed hubs, repeated commands


@pytest.mark.parametrize(
    "carried_out", [False, True], ids=["before the ranks did it", "before it heard of it"]
)
def test_a_hub_killed_during_a_command(own_hub: HubProcess, opened: Opened, carried_out: bool) -> None:
    client, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks))
    known(client, fleet)
    asked = client.propose({"micro_batches": 8})
    poll_until(client, lambda: fleet.agents[0].pending and asked in client.state.commands)
    own_hub.kill()
    if carried_out:
        fleet.turn()
    own_hub.start()
    command = settled(client, fleet, asked)
    assert (command.state, command.acks, command.before) == ("applied", 4, {"micro_batches": 4})
    assert fleet.carried_out == [command.revision]


def test_a_repeated_command_has_no_effect_after_restarts(own_hub: HubProcess, opened: Opened) -> None:
    client, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks))
    known(client, fleet)
    first = settled(client, fleet, client.propose({"micro_batches": 8}, id="once"))
    refused = settled(client, fleet, client.propose({"micro_batches": 3}, id="never"))
    own_hub.kill()
    own_hub.start()
    again = opened(Peer(own_hub.endpoints.clients))
    for _ in range(3):
        again.say(Propose("once", {"micro_batches": 1}), Propose("never", {"micro_batches": 2}))
    known(client, fleet)
    last = settled(client, fleet, client.propose({"recompute": "full"}))
    assert client.state.commands["once"].revision == first.revision
    assert client.state.commands["never"].why == refused.why
    assert fleet.carried_out == [first.revision, last.revision]
    assert fleet.boards[0].values == {"micro_batches": 8, "recompute": "full"}
    assert fleet.agents[0].pending is None


def test_an_illegal_combination_is_refused_as_a_whole(own_hub: HubProcess, opened: Opened) -> None:
    client, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks))
    fleet.boards = [paired_board() for _ in fleet.boards]
    fleet.introduce()
    poll_until(client, lambda: client.state.board and client.state.board.knobs[0].name == "width", fleet.turn)
    refused = settled(client, fleet, client.propose({"width": 4, "mode": "narrow"}))
    assert (refused.state, refused.why) == ("rejected", "width = 4 is not legal; legal: 1, 2")
    assert fleet.boards[0].values == {"width": 1, "mode": "narrow"}
    assert settled(client, fleet, client.propose({"width": 4, "mode": "wide"})).state == "applied"


# ------------------------------------------------------------------- 15: a rank that dies between vote and apply


def test_a_rank_that_dies_between_vote_and_apply(hasty_hub: HubProcess, opened: Opened) -> None:
    client, board = opened(Client(hasty_hub.endpoints.clients)), make_board()
    ranks = [opened(Peer(hasty_hub.endpoints.ranks)) for _ in range(4)]

    def alive(number: int) -> None:
        for rank in range(number):
            ranks[rank].say(Pulse(rank, 1, "forward", 0.0))

    for rank, peer in enumerate(ranks):
        peer.say(make_hello(rank, 4))
    ranks[0].say(BoardMessage(0, 0, board.digest(), board.states()))
    poll_until(client, lambda: client.state.board and len(client.state.hellos) == 4, lambda: alive(4))
    asked = client.propose({"micro_batches": 8})
    client.poll(0.2)
    assert isinstance(ranks[0].hear(Command), Command)
    for rank in range(3):
        ranks[rank].say(Ack(rank, 1, "applied", 1, "d1"))
    poll_until(client, lambda: 3 in client.state.gone, lambda: alive(3))
    poll_until(client, lambda: client.state.commands[asked].why, lambda: alive(3))
    half = client.state.commands[asked]
    assert (half.state, half.acks, half.settled) == ("applied", 3, False)
    assert half.why == "rank 3 was lost before its ack"
    with pytest.raises(TimeoutError, match="applied on 3 of 4 ranks"):
        wait_for_command(client, asked, 0.1)
    # The run ends in its next collective. A resumed run starts from a checkpoint before the command, on every rank.
    ranks[0].say(make_hello(0, 4, began_s=time.time()))
    poll_until(client, lambda: client.state.commands[asked].settled, lambda: alive(3))
    assert client.state.commands[asked].state == "rolled_back"


# ---------------------------------------------------------------------------------- 16: during a save or a restore


def test_a_command_during_a_restore_waits_and_reports_it(own_hub: HubProcess, opened: Opened) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    asked = client.propose({"micro_batches": 8})
    waits = wait_for_command(client, asked, 5.0, settled=False)
    assert waits.state == "accepted" and "waits for the ranks, which have not sent their knobs" in waits.why
    fleet = opened(Fleet(own_hub.endpoints.ranks))  # restored
    command = settled(client, fleet, asked)
    assert (command.state, command.acks, command.why) == ("applied", 4, "")


def test_a_command_during_a_save_waits_and_reports_it(own_hub: HubProcess, opened: Opened) -> None:
    client, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks))
    known(client, fleet)
    since = time.monotonic() - 20
    fleet.doing = lambda: (fleet.step, "waiting for the checkpoint", since)  # type: ignore[method-assign]
    poll_until(client, lambda: client.state.pulses[0].since_ms > 1e4)
    asked = client.propose({"micro_batches": 8})
    waits = wait_for_command(client, asked, 5.0, settled=False)
    assert waits.why == "it waits for a step to end: rank 0 is in waiting for the checkpoint"
    assert fleet.carried_out == []
    assert settled(client, fleet, asked).state == "applied"


# --------------------------------------------------------------------------------------------- 17: two operators


def test_one_of_two_operators_with_one_base_is_refused(own_hub: HubProcess, opened: Opened) -> None:
    clients = [opened(Client(own_hub.endpoints.clients)) for _ in range(2)]
    fleet = opened(Fleet(own_hub.endpoints.ranks))
    for client in clients:
        known(client, fleet)
    for base in range(3):
        ready = threading.Barrier(2)
        asked = ["", ""]

        def race(number: int, base: int = base, ready: threading.Barrier = ready) -> None:
            ready.wait()
            value = fleet.boards[0].values["micro_batches"]
            other = [one for one in (1, 2, 4, 8) if one != value][number]
            asked[number] = clients[number].propose({"micro_batches": other}, base_revision=base)  # noqa: B023

        racers = [threading.Thread(target=race, args=(number,)) for number in range(2)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        states = [settled(client, fleet, id) for client, id in zip(clients, asked, strict=True)]
        (won,) = [state for state in states if state.state == "applied"]
        (lost,) = [state for state in states if state.state == "rejected"]
        assert won.revision == base + 1 and lost.revision == 0
        assert "another change to revision" in lost.why or "the board has changed" in lost.why
        assert fleet.boards[0].values["micro_batches"] == won.changes["micro_batches"]
    assert fleet.carried_out == [1, 2, 3]


# ------------------------------------------------------------------------------- a trial whose operator is killed


def test_a_trial_continues_without_its_operator(own_hub: HubProcess, opened: Opened) -> None:
    watcher, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(own_hub.endpoints.ranks))
    known(watcher, fleet)
    operator = Client(own_hub.endpoints.clients)
    trial = operator.start_trial({"micro_batches": 8}, 6)
    try:
        poll_until(operator, lambda: trial in operator.state.trials, fleet.turn)
    finally:
        operator.close()
    poll_until(watcher, lambda: fleet.boards[0].values["micro_batches"] == 8, fleet.turn)
    own_hub.kill()
    own_hub.start()

    def taken_back() -> bool:
        return trial in watcher.state.trials and watcher.state.trials[trial].settled

    poll_until(watcher, taken_back, fleet.turn)
    assert watcher.state.trials[trial].state == "reverted", "as fast as before is not clearly faster"
    assert fleet.boards[0].values["micro_batches"] == 4


def test_a_new_hub_requests_acks_sent_to_the_old_hub(own_hub: HubProcess, opened: Opened) -> None:
    """A rank that has applied a command may have sent its ack only to the hub that was killed. If the rank's hello to
    the new hub comes without that ack, the hub requests another hello, with which the rank repeats the ack."""
    client, board = opened(Client(own_hub.endpoints.clients)), make_board()
    ranks = [opened(Peer(own_hub.endpoints.ranks)) for _ in range(2)]
    shown = BoardMessage(0, 0, board.digest(), board.states())
    ranks[0].say(make_hello(0, 2), shown)
    ranks[1].say(make_hello(1, 2))
    poll_until(client, lambda: client.state.board and len(client.state.hellos) == 2)
    asked = client.propose({"micro_batches": 8})
    poll_until(client, lambda: asked in client.state.commands)
    assert isinstance(ranks[0].hear(Command), Command)
    own_hub.kill()  # before any rank sends a message
    own_hub.start()
    ranks[0].say(make_hello(0, 2, revision=1), shown, Ack(0, 1, "applied", 1, "d1"))
    poll_until(client, lambda: client.state.commands[asked].acks == 1)
    ranks[1].say(make_hello(1, 2, revision=1))
    assert isinstance(ranks[1].hear(Welcome), Welcome)
    ranks[1].say(make_hello(1, 2, revision=1), Ack(1, 1, "applied", 1, "d1"))
    poll_until(client, lambda: client.state.commands[asked].settled)
    with pytest.raises(AssertionError, match="no Welcome"):
        ranks[1].hear(Welcome, 0.3)
