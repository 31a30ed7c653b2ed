"""How the ranks of a loop that is not ours switch together: over a function that gives everyone everyone's bytes.

Once a step each rank says how its step went, and the leader with it which command waits, if any. Only then do they
speak a second time: each whether it can, and all commit or none. So a change lands between two steps, on every rank
at the same one, and what the job did as a whole is known on the way. A commit calls what is not ours, and may fail even
so: that rank says so, and differs from the others.

How often a rank exchanges depends on exchanged bytes alone. Whatever fails on one rank, in code of ours or not, it goes
on exchanging, for the others wait for it; only a failure of the exchange itself is raised.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from agents.protocol import Ack, Changes, Command, clip
from agents.rank.errors import named, sentence
from agents.rank.knob_board import KnobBoard

Agree = Callable[[bytes], Sequence[bytes]]
"""A collective: every rank calls it with bytes of its own, and gets those of every rank, by rank. May raise."""

LEADER = 0
WHY_BYTES = 512


class Word(Struct, array_like=True, frozen=True):
    """What one rank says at the end of a step."""

    step: int
    step_ms: float
    loss: float | None
    grad_norm: float | None
    tokens: int | None
    mfu: float | None
    command: Command | None = None  # from the leader: what waits, if it can be done there


class Disagreement(Exception):
    """The exchange has failed: the ranks cannot switch together any more; the text says why."""


_words = msgspec.msgpack.Decoder(Word)


class Agreement:
    """One rank's side. `settle` is told what became of a command, after the board has it; neither it nor `pending` may
    raise."""

    def __init__(
        self,
        rank: int,
        world: int,
        agree: Agree,
        board: KnobBoard,
        pending: Callable[[], Command | None],
        settle: Callable[[Ack], None],
    ) -> None:
        self._rank, self._world, self._agree, self._board = rank, world, agree, board
        self._pending, self._settle = pending, settle

    def step(self, word: Word) -> list[Word]:
        """End a step: what every rank says of it. Raises Disagreement."""
        mine = word
        if self._rank == LEADER:
            mine = msgspec.structs.replace(word, command=self._choose(word.step))
        said = self._exchange(msgspec.msgpack.encode(mine))
        try:
            words = [_words.decode(one) for one in said]
        except msgspec.MsgspecError as error:
            raise Disagreement(f"agree= gave bytes that no rank of this run sent: {error}") from None
        command = words[LEADER].command
        if command:
            self._vote(command, word.step)
        return words

    def _exchange(self, mine: bytes) -> list[bytes]:
        try:
            said = [bytes(memoryview(one)) for one in self._agree(mine)]
        except Exception as error:
            raise Disagreement(f"agree= failed: {named(error)}") from error
        if len(said) != self._world:
            raise Disagreement(f"agree= gave the bytes of {len(said)} ranks, and the run has {self._world}")
        return said

    def _choose(self, step: int) -> Command | None:
        """The pending command, unless the leader can already tell that nothing will come of it."""
        command = self._pending()
        if command is None or command.revision <= self._board.revision:
            return None
        if command.expires_step is not None and step + 1 > command.expires_step:
            self._settle(self._ack(command, "expired", step, f"step {command.expires_step} has passed"))
            return None
        try:
            self._board.prepare(command.changes)
        except BaseException as refusal:  # noqa: BLE001 - whatever a proposal does to a knob, training goes on
            self._settle(self._ack(command, "rejected", step, sentence(refusal)))
            return None
        return command

    def _vote(self, command: Command, step: int) -> None:
        why, prepared = "", []
        try:
            prepared = self._board.prepare(command.changes)
        except BaseException as refusal:  # noqa: BLE001 - a rank that cannot must still say so, or the others hang
            why = sentence(refusal)
        votes = [vote.decode(errors="replace") for vote in self._exchange(why.encode()[:WHY_BYTES])]
        against = [f"rank {rank}: {vote}" for rank, vote in enumerate(votes) if vote]
        if against:
            if self._rank == LEADER:
                self._settle(self._ack(command, "rejected", step, against[0]))
            return
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
