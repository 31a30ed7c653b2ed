"""One rank's part in a vote on a command: when to vote, when to commit, and which acks to send.

The ranks of a training loop (`agents.loop.vote`) and the engine's ranks (`engine.control.vote`) exchange votes in
different ways, but follow the same rules. An empty vote means agreement; any other string is the rank's objection.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from agents.protocol import Ack, Changes, Command, clip
from agents.rank.errors import sentence
from agents.rank.knob_board import KnobBoard, Prepared

LEADER = 0
VOTE_BYTES = 512  # the longest objection

Pending = Callable[[], Command | None]


class Voter:
    """Takes part in the ranks' votes on behalf of one rank. `pending` returns the command that the leader must put to
    the vote next, or None. `settle` is called with this rank's ack of the command, after the knob board is updated.

    `errors`: the exceptions that a knob may raise to refuse a change. Even if something fails on a rank, that rank
    still votes, because the other ranks wait for its vote. `waiting` is called on the leader at each step at which a
    command cannot take effect yet, with the reason (`Knob.waits`).
    """

    def __init__(
        self,
        rank: int,
        board: KnobBoard,
        pending: Pending,
        settle: Callable[[Ack], None],
        errors: type[BaseException] = Exception,
        waiting: Callable[[Command, str], None] = lambda command, why: None,
    ) -> None:
        self._rank, self._board, self._waiting = rank, board, waiting
        self._pending, self._settle = pending, settle
        self._errors = errors

    def choose(self, step: int) -> Command | None:
        """On the leader: the pending command to vote on, or None. An expired or illegal command is refused at once,
        without a vote."""
        command = self._pending()
        if command is None or command.revision <= self._board.revision:
            return None
        if command.expires_step is not None and step + 1 > command.expires_step:
            self._settle(self._ack(command, "expired", step, f"step {command.expires_step} has passed"))
            return None
        try:
            self._board.prepare(command.changes)
            wait = self._board.waits(command.changes)
        except self._errors as refusal:
            self._settle(self._ack(command, "rejected", step, sentence(refusal)))
            return None
        if wait:
            self._waiting(command, wait)
            return None
        return command

    def vote(self, command: Command, step: int, exchange: Callable[[str], Sequence[str]]) -> Prepared | None:
        """Prepare the command's changes and exchange votes with the other ranks. Returns the argument `prepared` of
        `commit`, or None if a rank votes against the command.

        `exchange` takes this rank's vote and returns the votes of all ranks, in rank order.
        """
        why: str = ""
        prepared: Prepared = []
        try:
            prepared = self._board.prepare(command.changes)
            # The leader can commit now, so every rank must be able to commit.
            why = self._board.waits(command.changes)
        except self._errors as refusal:
            why = sentence(refusal)
        objections = [f"rank {rank}: {vote}" for rank, vote in enumerate(exchange(why)) if vote]
        if not objections:
            return prepared
        if self._rank == LEADER:
            self._settle(self._ack(command, "rejected", step, objections[0]))
        return None

    def commit(self, command: Command, prepared: Prepared, step: int) -> None:
        """Apply the command, which takes effect in the step after `step`. If the commit fails on this rank, the rank's
        ack reports the command as rejected.
        """
        before = self._board.in_force(command.changes)
        failed = self._board.commit(command.revision, command.changes, prepared)
        self._settle(self._ack(command, "rejected" if failed else "applied", step + 1, failed, before))

    def _ack(
        self,
        command: Command,
        state: Literal["applied", "rejected", "expired"],
        step: int,
        why: str,
        before: Changes | None = None,
    ) -> Ack:
        return Ack(self._rank, command.revision, state, step, self._board.digest(), clip(why), before or {})
