"""The vote by which the ranks of a training loop change knobs together. The training program provides the all-gather
that the vote uses.

After each step the ranks exchange the measurements of that step, and the leader adds the pending command, if any. If
there is a command, the ranks exchange a second time: each rank votes on whether it can apply the change, and all ranks
commit or none does. So a change takes effect between the same two steps on every rank, and rank 0 receives the metrics
of all ranks. A commit calls the program's own code and may still fail. The rank on which the commit fails rejects the
command, and its knobs then differ from those of the other ranks.

The number of exchanges depends only on the exchanged data, so it is equal on all ranks. Even if something fails on a
rank, that rank still takes part in the exchanges, because the other ranks wait for it. Only a failure of the exchange
itself raises an exception.
"""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from agents.protocol import Ack, Command
from agents.rank.errors import named
from agents.rank.knob_board import KnobBoard
from agents.rank.vote import LEADER, VOTE_BYTES, Pending, Voter

Agree = Callable[[bytes], Sequence[bytes]]
"""An all-gather: every rank passes its bytes and gets the bytes of all ranks, in rank order. May raise."""


class RankStep(Struct, array_like=True, frozen=True):
    """The measurements of a step on one rank, which all ranks exchange at the end of the step."""

    step: int
    step_ms: float
    loss: float | None
    grad_norm: float | None
    tokens: int | None
    mfu: float | None
    command: Command | None = None  # from the leader: the pending command, if the leader can apply it
    weight: float | None = None  # weight of the loss in the job's mean; None: the number of tokens
    loads: dict[int, list[int]] | None = None  # the (token, expert) pairs of this rank, by layer and expert
    batch: list[int] | None = None  # equal on ranks that train on the same tokens; None: no other rank does
    skipped: bool = False  # the update was skipped, because a gradient was not finite


class Disagreement(Exception):
    """The ranks can no longer change knobs together, because the exchange at the end of a step failed. The message
    gives the reason."""


_decoder = msgspec.msgpack.Decoder(RankStep)


class Agreement:
    """The part that one rank takes in the votes on commands (knob changes and actions). `settle` is called with the
    outcome of a command, after the knob board is updated. `waiting` is called with a command that waits for a later
    step, and with the reason. `settle`, `waiting` and `pending` must not raise.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        agree: Agree,
        board: KnobBoard,
        pending: Pending,
        settle: Callable[[Ack], None],
        waiting: Callable[[Command, str], None] = lambda command, why: None,
    ) -> None:
        self._rank, self._world, self._agree = rank, world, agree
        # No error raised by a knob may end training, not even a BaseException that is not an Exception.
        self._voter = Voter(rank, board, pending, settle, BaseException, waiting)

    def step(self, own: RankStep) -> list[RankStep]:
        """Exchange the measurements of a finished step among all ranks and, if a command is pending, vote on it. Raises
        Disagreement if an exchange fails.
        """
        if self._rank == LEADER:
            own = msgspec.structs.replace(own, command=self._voter.choose(own.step))
        gathered = self._exchange(msgspec.msgpack.encode(own))
        try:
            steps = [_decoder.decode(packed) for packed in gathered]
        except msgspec.MsgspecError as error:
            raise Disagreement(f"agree= returned bytes that no rank of this run sent: {error}") from None
        command = steps[LEADER].command
        if command:
            self._vote(command, own.step)
        return steps

    def _exchange(self, own: bytes) -> list[bytes]:
        try:
            gathered = [bytes(memoryview(one)) for one in self._agree(own)]
        except Exception as error:
            raise Disagreement(f"agree= failed: {named(error)}") from error
        if len(gathered) != self._world:
            raise Disagreement(
                f"agree= returned bytes of {len(gathered)} ranks, but the run has {self._world}"
            )
        return gathered

    def _vote(self, command: Command, step: int) -> None:
        prepared = self._voter.vote(command, step, self._exchange_votes)
        if prepared is not None:
            self._voter.commit(command, prepared, step)

    def _exchange_votes(self, own: str) -> list[str]:
        return [vote.decode(errors="replace") for vote in self._exchange(own.encode()[:VOTE_BYTES])]
