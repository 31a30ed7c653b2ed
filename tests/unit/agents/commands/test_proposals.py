"""Which proposals are accepted, and how the others are rejected."""

import time
from pathlib import Path

import pytest
from msgspec import structs

from agents import protocol
from agents.hub.commands.control import WAITING
from agents.protocol import Board, Changes, KnobState, Legal, Propose, codec
from tests.unit.agents.control_harness import EIGHT, WORLD, ControlHarness
from tests.unit.agents.fleet import make_hello, make_summary


@pytest.mark.parametrize(
    ("changes", "base", "expires", "why"),
    [
        ({"mb": 1}, None, None, "there is no knob mb; the knobs are micro_batches, lr"),
        ({"micro_batches": 3}, None, None, "micro_batches = 3 is not legal; legal: 1, 2, 4, 8"),
        ({"micro_batches": True}, None, None, "micro_batches = true is not legal"),
        ({}, None, None, "contains no change"),
        (EIGHT, 4, None, "the board has changed: revision 0, not 4"),
        (EIGHT, None, 6, "step 6 has passed; the run is at step 7"),
    ],
)
def test_refused_at_once(
    controller: ControlHarness, changes: Changes, base: int | None, expires: int | None, why: str
) -> None:
    controller.update_log.publish(make_summary(7))
    refused = controller.propose("a", changes, base, expires)
    assert (refused.state, refused.revision, refused.settled) == ("rejected", 0, True)
    assert why in refused.why
    assert controller.propose("b", EIGHT, 0, 7).revision == 1, "a refusal uses no revision"


def test_a_refusal_fits_a_frame_with_any_number_of_knobs(controller: ControlHarness) -> None:
    knobs = [KnobState(f"{number:0>64}", 1, Legal([1]), True) for number in range(256)]
    controller.update_log.publish(Board(0, 0, "d", knobs))
    refused = controller.propose("a", {"mb": 1})
    assert codec.decode(codec.encode([refused])) == [refused]


def test_the_largest_proposal_fits_a_frame(controller: ControlHarness) -> None:
    names = [f"{number:𝟙>64}" for number in range(64)]
    controller.update_log.publish(
        Board(0, 0, "d", [KnobState(name, "𝟙" * 256, Legal(), True) for name in names])
    )
    propose = Propose("𝟙" * 64, dict.fromkeys(names, "𝟙" * 256), None, None, "𝟙" * protocol.TEXT)
    assert codec.decode(codec.encode([propose])) == [propose]
    assert controller.propose(propose.id, propose.changes).state == "accepted"


def test_without_a_leader_proposals_are_refused(controller: ControlHarness) -> None:
    controller.membership.newly_lost(100.0)
    assert "the leader, rank 0, is gone" in controller.propose("b", EIGHT).why


def test_a_proposal_before_the_ranks_connect_waits_for_them(tmp_path: Path) -> None:
    controller = ControlHarness(tmp_path / "run.db")
    asked = controller.propose("a", EIGHT)
    assert (asked.state, asked.revision, asked.settled) == ("accepted", 1, False)
    assert asked.why == "it waits for the ranks, which have not sent their knobs yet"
    leader = structs.replace(make_hello(0, WORLD), began_s=time.time() + 1)
    controller.control.leader_began(leader)
    controller.train()
    controller.control.publish_waiting()
    assert controller.update_log.state.commands["a"].why == ""
    command = controller.control.next_command(0.0)
    assert command and command.changes == EIGHT
    # the leader has applied the command, and acknowledges it again
    controller.control.leader_began(structs.replace(leader, revision=1))
    controller.ack(1, *range(WORLD))
    known = controller.update_log.state.commands["a"]
    assert (known.state, known.before, known.settled) == ("applied", {"micro_batches": 4}, True)
    controller.journal.close()


def test_changes_that_depend_on_each_other_are_judged_by_the_ranks(controller: ControlHarness) -> None:
    """The legal values of one knob can depend on another knob in the same proposal."""
    assert controller.propose("a", {"micro_batches": 3, "lr": 0.2}).state == "accepted"
    controller.ack(1, 0, state="rejected", digest="d", why="micro_batches = 3 is not legal")
    known = controller.update_log.state.commands["a"]
    assert (known.state, known.why, known.applied_step) == (
        "rejected",
        "micro_batches = 3 is not legal",
        None,
    )


def test_a_repeated_id_is_applied_once(controller: ControlHarness) -> None:
    controller.propose("a", EIGHT)
    assert controller.propose("a", {"micro_batches": 2}).changes == EIGHT
    assert controller.propose("b", {"micro_batches": 2}).revision == 2


def test_an_id_repeated_before_the_journal_write_is_applied_once(controller: ControlHarness) -> None:
    for _ in range(2):
        controller.control.propose(Propose("a", EIGHT))
    controller.settle()
    command = controller.control.next_command(0.0)
    assert command and command.revision == 1
    controller.ack(1, 0, 1, 2)
    assert controller.control.next_command(100.0) is None
    assert controller.propose("b", {"micro_batches": 2}).revision == 2


def test_one_of_two_proposals_with_one_base_is_refused(controller: ControlHarness) -> None:
    for id in ("a", "b"):  # the second arrives while the first is being written to disk
        controller.control.propose(Propose(id, EIGHT, 0, None, f"operator {id}"))
    controller.settle()
    states = controller.update_log.state.commands
    assert states["a"].state == "accepted"
    assert (states["b"].state, states["b"].revision) == ("rejected", 0)
    assert states["b"].why == "another change to revision 0 is pending, by operator a"
    controller.ack(1, 0, 1, 2)
    assert "the board has changed: revision 1, not 0" in controller.propose("c", EIGHT, 0).why
    assert controller.propose("d", EIGHT, 1).state == "accepted"


def test_pending_commands_are_bounded(controller: ControlHarness) -> None:
    for number in range(WAITING):
        controller.propose(f"a{number}", EIGHT)
    assert "already pending" in controller.propose("b", EIGHT).why
