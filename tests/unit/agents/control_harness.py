"""Runs `Control`, which handles proposals and commands in a hub, with ranks, a knob board and the file of commands
(journal), but without sockets."""

from pathlib import Path

from agents.hub.commands.control import Control
from agents.hub.commands.journal import Journal
from agents.hub.telemetry.membership import Membership
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Ack, Board, Changes, CommandState, KnobState, Legal, Propose
from agents.rank.knob_board import Values
from tests.unit.agents.fleet import make_hello

WORLD = 3


class ControlHarness:
    """A `Control` with a membership, an update log and a journal, all created as a starting hub creates them. `train`
    sends the ranks' hellos and the leader's knob board."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start()

    def start(self) -> None:
        self.update_log = UpdateLog()
        self.membership = Membership("r")
        self.journal = Journal(self.path)
        self.control = Control(self.update_log, self.membership, self.journal)

    def train(self, revision: int = 0) -> None:
        """Register a hello from each rank. Then publish the leader's `Board` message, which lists the tunable settings
        (knobs) with their current and legal values."""
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
        """Propose a change, and wait until it is written to the journal."""
        self.control.propose(Propose(id, dict(changes), base, expires, "me"))
        self.settle()
        return self.update_log.state.commands[id]

    def settle(self) -> None:
        self.journal.flush(5.0)
        for written in self.journal.take():
            self.control.journal_wrote(written)

    def ack(
        self, revision: int, *ranks: int, state: str = "applied", digest: str = "d1", why: str = ""
    ) -> None:
        self.control.next_command(-1e9)  # marks the first waiting command as sent to the leader
        for rank in ranks:
            self.control.ack(Ack(rank, revision, state, 12, digest, why))  # type: ignore[arg-type]
        self.control.publish_acks()

    @property
    def errors(self) -> list[str]:
        return [event.text for event in self.update_log.state.events if event.level == "error"]


EIGHT: Changes = {"micro_batches": 8}
