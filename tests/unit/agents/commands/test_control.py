"""A command from proposal to acknowledgement, with a real journal and no socket."""

from agents.hub.commands.control import RESEND_S
from tests.unit.agents.control_harness import EIGHT, ControlHarness


def test_a_long_command_is_applied_at_its_end_and_blocks_no_other(
    controller: ControlHarness,
) -> None:
    controller.propose("save", {"micro_batches": 2})
    controller.propose("next", EIGHT)
    controller.ack(1, 0, state="agreed", why="it is being written")
    state = controller.update_log.state.commands["save"]
    assert (state.state, state.why, state.acks, state.settled) == (
        "accepted",
        "it is being written",
        0,
        False,
    )
    command = controller.control.next_command(0.0)
    assert command and command.revision == 2, "the next command in the queue continues"
    controller.ack(2, 0, 1, 2)
    controller.ack(1, 1, state="rejected", why="disk full")
    assert not controller.update_log.state.commands["save"].settled, "only the leader may reject it"
    controller.ack(1, 0, 2, state="rejected", why="disk full")
    state = controller.update_log.state.commands["save"]
    assert (state.state, state.why, controller.errors) == ("rejected", "disk full", [])


def test_accepted_applied_and_settled(controller: ControlHarness) -> None:
    accepted = controller.propose("a", EIGHT, base=0)
    assert (accepted.state, accepted.revision, accepted.before, accepted.who) == (
        "accepted",
        1,
        {"micro_batches": 4},
        "me",
    )
    command = controller.control.next_command(0.0)
    assert command is not None and (command.revision, command.id, command.changes) == (1, "a", EIGHT)
    controller.ack(1, 0, 1)
    known = controller.update_log.state.commands["a"]
    assert (known.state, known.acks, known.world, known.applied_step, known.settled) == (
        "applied",
        2,
        3,
        12,
        False,
    )
    controller.ack(1, 2)
    assert controller.update_log.state.commands["a"].settled
    assert (
        controller.control.next_command(99.0) is None
        and controller.control.revision == 1
        and controller.errors == []
    )


def test_commands_are_sent_in_order_and_repeated_until_acknowledged(controller: ControlHarness) -> None:
    for id in ("a", "b"):
        controller.propose(id, EIGHT)
    sent = [controller.control.next_command(now) for now in (0.0, 0.1, RESEND_S, RESEND_S + 0.1)]
    assert [command.revision if command else None for command in sent] == [1, None, 1, None]
    controller.ack(1, 0)
    second = controller.control.next_command(RESEND_S + 0.2)
    assert second is not None and second.revision == 2


def test_ranks_that_differ_are_an_error(controller: ControlHarness) -> None:
    controller.propose("a", EIGHT)
    controller.ack(1, 0)
    controller.ack(1, 1, digest="other")
    controller.ack(1, 2, state="rejected", digest="d1", why="micro_batches was not applied: no memory")
    assert controller.errors == [
        "after revision 1 the knobs of rank 1 differ from those of other ranks",
        "rank 2 reports rejected for revision 1, other ranks applied: micro_batches was not applied: no memory",
    ]
    state = controller.update_log.state.commands["a"]
    assert (state.state, state.acks, state.settled) == ("applied", 2, False), "not on all ranks"
    assert state.why == "rank 2 reports rejected: micro_batches was not applied: no memory"
    assert (state.failed, state.final) == (1, True), "every rank has answered, so no client waits longer"
    controller.restart()
    assert controller.update_log.state.commands["a"] == state, "a log that is read later has the same text"


def test_partial_acks_are_journalled(controller: ControlHarness) -> None:
    """The journal must contain the acks received so far. Without them, the log would contradict what it said before as
    soon as the run has ended or the hub has restarted."""
    controller.propose("a", EIGHT)
    controller.ack(1, 0)
    controller.ack(1, 1)
    controller.control.journal_counts()
    controller.restart()
    assert controller.update_log.state.commands["a"].acks == 2
    controller.control.rank_lost(2)
    controller.control.publish_acks()
    lost = controller.update_log.state.commands["a"]
    assert (lost.acks, lost.why, lost.final) == (2, "rank 2 was lost before its ack", False)
    controller.restart()
    controller.train(revision=1)
    assert controller.update_log.state.commands["a"] == lost
    controller.ack(1, 0, 1, 2)
    whole = controller.update_log.state.commands["a"]
    assert (whole.acks, whole.why) == (3, ""), "it is back"


def test_an_ack_counts_once(controller: ControlHarness) -> None:
    controller.propose("a", EIGHT)
    controller.ack(1, 0)
    published = controller.update_log.seq
    controller.ack(1, 0, 0)
    assert controller.update_log.state.commands["a"].acks == 1 and controller.update_log.seq == published
