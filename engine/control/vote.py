"""Vote on a change of knobs at a step boundary: a two-phase commit over the ranks' own process group.

At the start of a step the leader (rank 0) starts a broadcast of 24 bytes, which the ranks complete at the end of the
step. The message contains the revision and the size of the newest pending command, and whether the run must stop and
must save. If the revision is new, the leader broadcasts the command. All ranks prepare the change and gather all votes.
Then either all ranks commit the change or none does. So all ranks apply a change between the same two steps, and no
rank keeps an old value.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from agents.protocol import Ack, Command
from agents.rank.knob_board import KnobBoard
from agents.rank.vote import LEADER as LEADER
from agents.rank.vote import VOTE_BYTES, Pending, Voter
from engine.checkpoint.manifest import Applied
from engine.parallel.collectives import AsyncCollective, Axis

STOP, SAVE = 1, 2  # bits of the header


@dataclass(frozen=True)
class Vote:
    """One rank's vote on a command. `why`: the rank's objection; empty if the rank agrees."""

    why: str

    def packed(self) -> Tensor:
        raw = self.why.encode()[:VOTE_BYTES].ljust(VOTE_BYTES, b"\0")
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    @staticmethod
    def unpacked(row: Tensor) -> "Vote":
        return Vote(bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore"))


class KnobVote:
    """Takes part in the votes on knob changes on behalf of one rank. Call `begin` at the start and `end` at the end of
    each step."""

    def __init__(self, control: Axis, board: KnobBoard, pending: Pending, settle: Callable[[Ack], None]):
        self._control, self._board = control, board
        self._voter = Voter(control.rank, board, pending, settle)
        self._rank = control.rank
        self._payload = b""
        self._header = torch.zeros(
            3, dtype=torch.int64
        )  # revision, size of the command in bytes, STOP and SAVE
        self._broadcast: AsyncCollective | None = None
        self.history: list[Applied] = []
        self.save = False  # whether the leader requested a checkpoint in this step

    def begin(self, step: int, stop: bool, save: bool = False) -> None:
        """Start the leader's broadcast of the revision and size of the newest pending command, and of whether to stop
        and to save. Only the leader's `stop` and `save` have an effect."""
        if self._rank == LEADER:
            # There is no vote after the last step, because no later step would use the change.
            command = None if stop else self._voter.choose(step)
            self._payload = msgspec.msgpack.encode(command) if command else b""
            revision = command.revision if command else self._board.revision
            self._header = torch.tensor([revision, len(self._payload), STOP * stop + SAVE * save])
        self._broadcast = self._control.start_broadcast(self._header, LEADER)

    def end(self, step: int) -> bool:
        """Vote on the command that `begin` announced, and apply it if all ranks agree. Returns True if the run must
        stop after this step. Sets `save` to True if the leader requested a checkpoint, else to False."""
        if self._broadcast:
            self._broadcast.wait()
        revision, size, flags = self._header.tolist()
        self.save = bool(flags & SAVE)
        if revision > self._board.revision and size:
            self._decide(self._share(size), step)
        return bool(flags & STOP)

    def _share(self, size: int) -> Command:
        """Broadcast the leader's command, which has `size` bytes, and return it."""
        payload = torch.zeros(size, dtype=torch.uint8)
        if self._rank == LEADER:
            payload = torch.frombuffer(bytearray(self._payload), dtype=torch.uint8)
        self._control.start_broadcast(payload, LEADER).wait()
        return msgspec.msgpack.decode(bytes(payload.tolist()), type=Command)

    def _decide(self, command: Command, step: int) -> None:
        """Prepare the command, gather the votes, and commit it if no rank objects."""
        prepared = self._voter.vote(command, step, self._exchange_votes)
        if prepared is not None:
            self.history.append(Applied(command.revision, step + 1, command.changes))
            self._voter.commit(command, prepared, step)

    def _exchange_votes(self, own: str) -> list[str]:
        return [Vote.unpacked(row).why for row in self._control.all_gather(Vote(own).packed())]
