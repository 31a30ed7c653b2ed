"""Commands across a hub restart, the end of a run, and a run resumed from a checkpoint."""

import time
from pathlib import Path

import pytest
from msgspec import structs

from tests.unit.agents.control_harness import EIGHT, WORLD, ControlHarness
from tests.unit.agents.fleet import make_hello


@pytest.mark.parametrize("end", ["ends", "goes on before", "goes on after", "hub restart"])
def test_pending_commands_are_settled_when_the_leader_ends(controller: ControlHarness, end: str) -> None:
    controller.propose("save", {"micro_batches": 2})
    controller.ack(1, 0, state="agreed", why="it is being written")
    if end == "ends":
        controller.control.leader_ended()
    elif end == "hub restart":
        controller.restart()
        controller.train(revision=1)
        command = controller.control.next_command(0.0)
        assert command and command.revision == 1, "the leader reports its revision again"
        controller.ack(1, 0, state="agreed", why="it is being written")
        controller.ack(1, 0, 1, 2)
    else:
        # 1 if the checkpoint from which the run resumes includes the command.
        revision = int(end == "goes on after")
        controller.control.leader_began(make_hello(0, WORLD, revision=revision, began_s=time.time()))
        command = controller.control.next_command(1e9)
        assert (command is not None) == bool(revision)
        if command:
            controller.ack(1, 0, 1, 2)
    state = controller.update_log.state.commands["save"]
    settled = {
        "ends": "expired",
        "goes on before": "expired",
        "goes on after": "applied",
        "hub restart": "applied",
    }
    assert (state.state, state.settled) == (settled[end], True)


def test_a_waiting_command_with_a_used_revision_is_not_applied(tmp_path: Path) -> None:
    """The journal in a new folder numbers revisions from 1, but the run that resumes in this folder is already at
    revision 10."""
    controller = ControlHarness(tmp_path / "run.db")
    controller.propose("a", EIGHT)
    controller.control.leader_began(
        structs.replace(make_hello(0, WORLD, revision=10), step=5, began_s=time.time())
    )
    known = controller.update_log.state.commands["a"]
    assert (
        known.state == "expired"
        and "where this revision is already used; propose the change again" in known.why
    )
    controller.journal.close()


def test_the_end_of_a_leader_expires_waiting_commands(controller: ControlHarness) -> None:
    controller.propose("a", EIGHT)
    controller.control.leader_ended()
    known = controller.update_log.state.commands["a"]
    assert (known.state, known.why) == ("expired", "the run ended before the change was applied")


def test_the_end_of_a_run_settles_every_command_with_the_cause(controller: ControlHarness) -> None:
    controller.propose("half", EIGHT)
    controller.ack(1, 0)
    controller.propose("waits", {"micro_batches": 2})
    controller.control.leader_ended("rank 1 was killed by SIGKILL")
    states = controller.update_log.state.commands
    assert (states["half"].state, states["half"].acks) == ("applied", 1)
    assert (
        states["half"].why == "the run ended before every rank had acknowledged: rank 1 was killed by SIGKILL"
    )
    assert states["waits"].state == "expired"
    assert states["waits"].why == "the run ended before the change was applied: rank 1 was killed by SIGKILL"
    controller.restart()
    assert controller.update_log.state.commands == states


def test_a_restarted_hub_knows_ids_and_continues_the_revisions(controller: ControlHarness) -> None:
    controller.propose("a", EIGHT)
    controller.ack(1, 0, 1, 2)
    controller.propose("no", {"mb": 1})
    controller.propose("b", EIGHT, expires=30)
    controller.restart()
    controller.train(revision=1)
    states = controller.update_log.state.commands
    assert (states["a"].state, states["a"].acks, states["b"].state, states["no"].state) == (
        *("applied", 3, "accepted", "rejected"),
    )
    command = controller.control.next_command(0.0)
    assert command is not None and (command.revision, command.expires_step) == (2, 30), (
        "the waiting command is sent again"
    )
    assert controller.propose("a", {"micro_batches": 2}).revision == 1
    controller.ack(2, 0, 1, 2)
    assert controller.propose("c", EIGHT).revision == 3


def test_acknowledgements_lost_with_a_hub_are_counted_when_repeated(controller: ControlHarness) -> None:
    controller.propose("a", EIGHT)
    controller.ack(1, 0)
    controller.restart()
    controller.train(revision=1)
    assert not controller.update_log.state.commands["a"].settled
    controller.ack(1, 0, 1, 2)
    assert controller.update_log.state.commands["a"].settled and controller.errors == []


def test_a_revision_known_to_a_rank_is_never_reused(controller: ControlHarness) -> None:
    controller.control.note_revision(41)
    assert controller.propose("a", EIGHT).revision == 42


def test_an_id_that_is_not_loaded_is_found_on_disk(controller: ControlHarness) -> None:
    controller.propose("a", EIGHT)
    controller.ack(1, 0, 1, 2)
    del controller.update_log.state.commands["a"]
    assert (controller.propose("a", EIGHT).revision, controller.update_log.state.commands["a"].state) == (
        1,
        "applied",
    )
    assert controller.control.next_command(100.0) is None


def test_a_late_refusal_does_not_replace_an_earlier_result(controller: ControlHarness) -> None:
    controller.propose("a", EIGHT)
    controller.ack(1, 0, 1, 2)
    del controller.update_log.state.commands["a"]
    controller.propose("a", {"mb": 1})
    controller.restart()
    assert controller.update_log.state.commands["a"].state == "applied"


def test_a_resumed_run_has_the_revision_of_its_checkpoint(controller: ControlHarness) -> None:
    """Commands with later revisions count as rolled back, and waiting commands are not sent to the new leader."""
    controller.train()
    for number, id in enumerate(("kept", "lost"), 1):
        controller.propose(id, {"micro_batches": 2 * number})
        controller.ack(number, *range(WORLD))
    controller.propose("waits", {"micro_batches": 1})
    controller.restart()
    began = time.time()
    leader = structs.replace(make_hello(0, WORLD, revision=1), step=5, began_s=began)
    controller.train(revision=1)
    controller.control.leader_began(leader)
    states = {id: command.state for id, command in controller.update_log.state.commands.items()}
    assert states == {"kept": "applied", "lost": "rolled_back", "waits": "expired"}
    assert controller.update_log.state.commands["lost"].why == "the run resumed from step 5, at revision 1"
    assert controller.control.next_command(began) is None
    after = controller.propose("after", {"micro_batches": 8})
    assert (after.state, after.revision) == ("accepted", 4), "no number is used twice"
    controller.control.leader_began(leader)  # a restarted hub requests another hello
    command = controller.control.next_command(began)
    assert command and command.revision == 4
    controller.restart()
    assert controller.update_log.state.commands["lost"].state == "rolled_back", "on disk too"


def test_a_hello_without_a_start_time_rolls_nothing_back(controller: ControlHarness) -> None:
    controller.train()
    controller.propose("a", {"micro_batches": 2})
    controller.control.leader_began(make_hello(0, WORLD))
    assert controller.update_log.state.commands["a"].state == "accepted"
