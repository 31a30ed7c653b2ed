"""The life of a command, with a real journal and no socket."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from agents import protocol
from agents.hub.commands.control import RESEND_S, WAITING, Control
from agents.hub.commands.journal import Journal
from agents.hub.telemetry.membership import Membership
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Ack, Board, Changes, CommandState, KnobState, Legal, Propose, codec
from agents.rank.knob_board import Values
from agents.recording.commands import Entry
from tests.unit.agents.fleet import make_hello, make_summary

WORLD = 3


class Desk:
    """Control with a board, ranks and a journal; `start` is what a hub start does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start()

    def start(self) -> None:
        self.update_log = UpdateLog()
        self.membership = Membership("r")
        self.journal = Journal(self.path)
        self.control = Control(self.update_log, self.membership, self.journal)

    def train(self, revision: int = 0) -> None:
        """The ranks say hello, the leader with its board."""
        for rank in range(WORLD):
            self.membership.hello(bytes([rank]), make_hello(rank, WORLD, revision=revision), 0.0)
            self.control.note_revision(revision)
        knobs = [
            KnobState("micro_batches", 4, Legal([1, 2, 4, 8]), True),
            KnobState("lr", 0.1, Legal([]), False),
        ]
        self.update_log.publish(Board(0, revision, "d", knobs))

    def restart(self) -> None:
        self.journal.close()
        self.start()

    def propose(
        self, id: str, changes: Values, base: int | None = None, expires: int | None = None
    ) -> CommandState:
        """Propose, and wait for the journal."""
        self.control.propose(Propose(id, dict(changes), base, expires, "me"))
        self.settle()
        return self.update_log.state.commands[id]

    def settle(self) -> None:
        deadline = time.monotonic() + 5
        while self.control._being_written and time.monotonic() < deadline:
            for written in self.journal.take():
                self.control.journal_wrote(written)
            time.sleep(0.002)

    def ack(
        self, revision: int, *ranks: int, state: str = "applied", digest: str = "d1", why: str = ""
    ) -> None:
        self.control.next_command(-1e9)  # the first that waits is with the leader by now
        for rank in ranks:
            self.control.ack(Ack(rank, revision, state, 12, digest, why))  # type: ignore[arg-type]
        self.control.publish_acks()

    @property
    def errors(self) -> list[str]:
        return [event.text for event in self.update_log.state.events if event.level == "error"]


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Desk]:
    controller = Desk(tmp_path / "run.db")
    controller.train()
    yield controller
    controller.journal.close()


EIGHT: Changes = {"micro_batches": 8}


def test_what_takes_long_is_applied_when_it_is_done_and_keeps_nobody_waiting(controller: Desk) -> None:
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
    assert command and command.revision == 2, "what is behind it in the queue goes on"
    controller.ack(2, 0, 1, 2)
    controller.ack(1, 1, state="rejected", why="disk full")
    assert not controller.update_log.state.commands["save"].settled, "that is the leader's to say"
    controller.ack(1, 0, 2, state="rejected", why="disk full")
    state = controller.update_log.state.commands["save"]
    assert (state.state, state.why, controller.errors) == ("rejected", "disk full", [])


@pytest.mark.parametrize("end", ["ends", "goes on before", "goes on after", "hub restart"])
def test_what_was_under_way_when_the_leader_went_is_settled(controller: Desk, end: str) -> None:
    controller.propose("save", {"micro_batches": 2})
    controller.ack(1, 0, state="agreed", why="it is being written")
    if end == "ends":
        controller.control.leader_ended()
    elif end == "hub restart":
        controller.restart()
        controller.train(revision=1)
        command = controller.control.next_command(0.0)
        assert command and command.revision == 1, "the leader says again how far it is"
        controller.ack(1, 0, state="agreed", why="it is being written")
        controller.ack(1, 0, 1, 2)
    else:
        revision = int(end == "goes on after")  # the checkpoint that the run goes on from has it, or not
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


def test_accepted_applied_and_settled(controller: Desk) -> None:
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


@pytest.mark.parametrize(
    ("changes", "base", "expires", "why"),
    [
        ({"mb": 1}, None, None, "there is no knob mb; the knobs are micro_batches, lr"),
        ({"micro_batches": 3}, None, None, "micro_batches = 3 is not legal; legal: 1, 2, 4, 8"),
        ({"micro_batches": True}, None, None, "micro_batches = true is not legal"),
        ({}, None, None, "nothing is asked"),
        (EIGHT, 4, None, "the board has moved on: revision 0, not 4"),
        (EIGHT, None, 6, "step 6 is past; the run is at step 7"),
    ],
)
def test_refused_at_once(
    controller: Desk, changes: Changes, base: int | None, expires: int | None, why: str
) -> None:
    controller.update_log.publish(make_summary(7))
    refused = controller.propose("a", changes, base, expires)
    assert (refused.state, refused.revision, refused.settled) == ("rejected", 0, True)
    assert why in refused.why
    assert controller.propose("b", EIGHT, 0, 7).revision == 1, "a refusal takes no revision"


def test_a_refusal_fits_the_wire_however_many_knobs_there_are(controller: Desk) -> None:
    knobs = [KnobState(f"{number:0>64}", 1, Legal([1]), True) for number in range(256)]
    controller.update_log.publish(Board(0, 0, "d", knobs))
    refused = controller.propose("a", {"mb": 1})
    assert codec.decode(codec.encode([refused])) == [refused]


def test_the_largest_proposal_fits_a_frame(controller: Desk) -> None:
    names = [f"{number:𝟙>64}" for number in range(64)]
    controller.update_log.publish(
        Board(0, 0, "d", [KnobState(name, "𝟙" * 256, Legal(), True) for name in names])
    )
    propose = Propose("𝟙" * 64, dict.fromkeys(names, "𝟙" * 256), None, None, "𝟙" * protocol.TEXT)
    assert codec.decode(codec.encode([propose])) == [propose]
    assert controller.propose(propose.id, propose.changes).state == "accepted"


def test_without_a_leader_nothing_can_be_asked(controller: Desk) -> None:
    controller.membership.newly_lost(100.0)
    assert "rank 0, which leads, is gone" in controller.propose("b", EIGHT).why


def test_what_is_asked_before_the_ranks_are_here_waits_for_them(tmp_path: Path) -> None:
    controller = Desk(tmp_path / "run.db")
    asked = controller.propose("a", EIGHT)
    assert (asked.state, asked.revision, asked.settled) == ("accepted", 1, False)
    assert asked.why == "it waits for the ranks, which have not shown their knobs yet"
    leader = structs.replace(make_hello(0, WORLD), began_s=time.time() + 1)
    controller.control.leader_began(leader)
    controller.train()
    controller.control.publish_waiting()
    assert controller.update_log.state.commands["a"].why == ""
    command = controller.control.next_command(0.0)
    assert command and command.changes == EIGHT
    controller.control.leader_began(
        structs.replace(leader, revision=1)
    )  # it has applied it, and says so anew
    controller.ack(1, *range(WORLD))
    known = controller.update_log.state.commands["a"]
    assert (known.state, known.before, known.settled) == ("applied", {"micro_batches": 4}, True)
    controller.journal.close()


def test_what_waits_for_a_run_that_goes_on_under_its_number_is_not_taken_for_done(tmp_path: Path) -> None:
    """A new folder begins to count at 1; the run that goes on in it is at revision 10 already."""
    controller = Desk(tmp_path / "run.db")
    controller.propose("a", EIGHT)
    controller.control.leader_began(
        structs.replace(make_hello(0, WORLD, revision=10), step=5, began_s=time.time())
    )
    known = controller.update_log.state.commands["a"]
    assert known.state == "expired" and "where this number is taken; ask again" in known.why
    controller.journal.close()


def test_changes_that_belong_together_are_left_to_the_ranks(controller: Desk) -> None:
    """What one knob may be can depend on the other one that is asked for."""
    assert controller.propose("a", {"micro_batches": 3, "lr": 0.2}).state == "accepted"
    controller.ack(1, 0, state="rejected", digest="d", why="micro_batches = 3 is not legal")
    known = controller.update_log.state.commands["a"]
    assert (known.state, known.why, known.applied_step) == (
        "rejected",
        "micro_batches = 3 is not legal",
        None,
    )


def test_the_same_id_asks_once(controller: Desk) -> None:
    controller.propose("a", EIGHT)
    assert controller.propose("a", {"micro_batches": 2}).changes == EIGHT
    assert controller.control._last_revision == 1


def test_the_same_id_twice_before_the_disk_has_it_asks_once(controller: Desk) -> None:
    for _ in range(2):
        controller.control.propose(Propose("a", EIGHT))
    controller.settle()
    assert controller.control._last_revision == 1 and len(controller.control._waiting) == 1


def test_of_two_with_one_base_one_loses_cleanly(controller: Desk) -> None:
    for id in ("a", "b"):  # the second while the first is still on its way to the disk
        controller.control.propose(Propose(id, EIGHT, 0, None, f"operator {id}"))
    controller.settle()
    states = controller.update_log.state.commands
    assert states["a"].state == "accepted"
    assert (states["b"].state, states["b"].revision) == ("rejected", 0)
    assert states["b"].why == "another change to revision 0 is under way, by operator a"
    controller.ack(1, 0, 1, 2)
    assert "the board has moved on: revision 1, not 0" in controller.propose("c", EIGHT, 0).why
    assert controller.propose("d", EIGHT, 1).state == "accepted"


def test_one_at_a_time_in_order_and_again_until_acknowledged(controller: Desk) -> None:
    for id in ("a", "b"):
        controller.propose(id, EIGHT)
    sent = [controller.control.next_command(now) for now in (0.0, 0.1, RESEND_S, RESEND_S + 0.1)]
    assert [command.revision if command else None for command in sent] == [1, None, 1, None]
    controller.ack(1, 0)
    second = controller.control.next_command(RESEND_S + 0.2)
    assert second is not None and second.revision == 2


def test_what_is_under_way_is_bounded(controller: Desk) -> None:
    for number in range(WAITING):
        controller.propose(f"a{number}", EIGHT)
    assert "under way already" in controller.propose("b", EIGHT).why


def test_ranks_that_differ_are_an_error(controller: Desk) -> None:
    controller.propose("a", EIGHT)
    controller.ack(1, 0)
    controller.ack(1, 1, digest="other")
    controller.ack(1, 2, state="rejected", digest="d1", why="micro_batches was not applied: no memory")
    assert controller.errors == [
        "after revision 1 the knobs of rank 1 differ from those of other ranks",
        "rank 2 reports rejected of revision 1, others applied: micro_batches was not applied: no memory",
    ]
    state = controller.update_log.state.commands["a"]
    assert (state.state, state.acks, state.settled) == ("applied", 2, False), "not on all ranks"
    assert state.why == "rank 2 reports rejected: micro_batches was not applied: no memory"
    assert (state.failed, state.final) == (1, True), "every rank has answered: nobody needs to wait"
    controller.restart()
    assert controller.update_log.state.commands["a"] == state, "a log that is read later says the same"


def test_what_some_ranks_have_said_is_journalled(controller: Desk) -> None:
    """Else the log of a run that has ended, or that of a hub started again, contradicts what was told."""
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


def test_an_acknowledgement_counts_once(controller: Desk) -> None:
    controller.propose("a", EIGHT)
    controller.ack(1, 0)
    published = controller.update_log.seq
    controller.ack(1, 0, 0)
    assert controller.update_log.state.commands["a"].acks == 1 and controller.update_log.seq == published


def test_a_leader_that_ends_expires_what_waits(controller: Desk) -> None:
    controller.propose("a", EIGHT)
    controller.control.leader_ended()
    known = controller.update_log.state.commands["a"]
    assert (known.state, known.why) == ("expired", "the run ended before this was applied")


def test_the_end_of_a_run_settles_everything_and_says_why(controller: Desk) -> None:
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
    assert states["waits"].why == "the run ended before this was applied: rank 1 was killed by SIGKILL"
    controller.restart()
    assert controller.update_log.state.commands == states


# ---------------------------------------------------------------------------------------------- restarts


def test_a_restart_knows_ids_and_goes_on_numbering(controller: Desk) -> None:
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
        "what waited is delivered again"
    )
    assert controller.propose("a", {"micro_batches": 2}).revision == 1
    controller.ack(2, 0, 1, 2)
    assert controller.propose("c", EIGHT).revision == 3


def test_acknowledgements_lost_with_a_hub_are_counted_when_repeated(controller: Desk) -> None:
    controller.propose("a", EIGHT)
    controller.ack(1, 0)
    controller.restart()
    controller.train(revision=1)
    assert not controller.update_log.state.commands["a"].settled
    controller.ack(1, 0, 1, 2)
    assert controller.update_log.state.commands["a"].settled and controller.errors == []


def test_a_number_that_a_rank_has_seen_is_never_given_again(controller: Desk) -> None:
    controller.control.note_revision(41)
    assert controller.propose("a", EIGHT).revision == 42


def test_an_id_older_than_what_is_loaded_is_found_on_disk(controller: Desk) -> None:
    controller.propose("a", EIGHT)
    controller.ack(1, 0, 1, 2)
    del controller.update_log.state.commands["a"]
    assert (controller.propose("a", EIGHT).revision, controller.update_log.state.commands["a"].state) == (
        1,
        "applied",
    )
    assert not controller.control._waiting


def test_a_refusal_does_not_take_the_place_of_an_older_answer(controller: Desk) -> None:
    controller.propose("a", EIGHT)
    controller.ack(1, 0, 1, 2)
    del controller.update_log.state.commands["a"]
    controller.propose("a", {"mb": 1})
    controller.restart()
    assert controller.update_log.state.commands["a"].state == "applied"


# ----------------------------------------------------------------------------------------- a disk that fails


def test_a_full_disk_refuses_changes_and_recovers(controller: Desk) -> None:
    controller.propose("a", EIGHT)
    pages: int = sqlite3.connect(controller.path).execute("PRAGMA page_count").fetchone()[0]
    controller.journal._file._db.execute(f"PRAGMA max_page_count = {pages}")
    for number in range(20):
        controller.control.propose(Propose(f"b{number}", EIGHT, reason="x" * 4000))
        controller.settle()
    refused = controller.update_log.state.commands["b19"]
    assert (refused.state, refused.revision) == ("rejected", 0)
    assert "the journal cannot be written (database or disk is full)" in refused.why
    controller.journal._file._db.execute("PRAGMA max_page_count = 100000")
    assert controller.propose("c", EIGHT).state == "accepted"


def test_a_row_that_is_damaged_does_not_end_the_journal(controller: Desk) -> None:
    state = controller.propose("a", EIGHT)
    with sqlite3.connect(controller.path) as db:
        db.execute("UPDATE commands SET changes = '{' WHERE id = 'a'")
    controller.journal.insert(Entry(state))
    controller.journal.flush()
    (written,) = controller.journal.take()
    assert "holds a command of this name that cannot be read" in written.error
    assert controller.propose("b", {"micro_batches": 2}).state == "accepted"


@pytest.mark.parametrize("spoil", [Path.mkdir, lambda path: path.write_bytes(b"not a database" * 100)])
def test_a_journal_that_cannot_be_opened_refuses_every_change(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    spoil(tmp_path / "run.db")
    controller = Desk(tmp_path / "run.db")
    controller.train()
    assert "cannot be opened" in controller.journal.failure
    assert controller.propose("a", EIGHT).why == controller.journal.failure
    controller.journal.close()


def test_a_run_that_goes_on_from_a_snapshot_has_its_revision(controller: Desk) -> None:
    """Later revisions are rolled back; what was still waiting is not handed to the new leader."""
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
    assert controller.update_log.state.commands["lost"].why == "the run went on from step 5, at revision 1"
    assert controller.control.next_command(began) is None
    after = controller.propose("after", {"micro_batches": 8})
    assert (after.state, after.revision) == ("accepted", 4), "no number is used twice"
    controller.control.leader_began(leader)  # a hub that has started anew asks for hello again
    command = controller.control.next_command(began)
    assert command and command.revision == 4
    controller.restart()
    assert controller.update_log.state.commands["lost"].state == "rolled_back", "on disk too"


def test_a_hello_that_does_not_say_when_it_began_rolls_nothing_back(controller: Desk) -> None:
    controller.train()
    controller.propose("a", {"micro_batches": 2})
    controller.control.leader_began(make_hello(0, WORLD))
    assert controller.update_log.state.commands["a"].state == "accepted"
