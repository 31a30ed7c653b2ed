"""The agreement at a step boundary: ZeroMQ proposes, the collective disposes.

At the start of a step the leader (rank 0) broadcasts 24 bytes that nobody waits for until the step's end: the newest
pending revision, the size of its command, and whether to stop. Only when there is a newer revision do the ranks
exchange the command, prepare it, gather each other's votes, and commit all or none. So a switch lands between two
steps, on every rank at the same one, and no rank can be left behind holding another value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import Tensor

from agents.protocol import Ack, Changes, Command
from agents.rank.errors import sentence
from agents.rank.knob_board import KnobBoard
from engine.checkpoint.folders import Applied
from engine.parallel.collectives import AsyncCollective, Axis

LEADER = 0
_VOTE_BYTES = 512

Pending = Callable[[], Command | None]


@dataclass(frozen=True)
class Vote:
    """One rank's word on a command: empty `why` is a yes."""

    why: str

    def packed(self) -> Tensor:
        raw = self.why.encode()[:_VOTE_BYTES].ljust(_VOTE_BYTES, b"\0")
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    @staticmethod
    def unpacked(row: Tensor) -> "Vote":
        return Vote(bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore"))


class KnobVote:
    """One rank's side of the agreement. `begin` and `end` frame each step."""

    def __init__(self, control: Axis, board: KnobBoard, pending: Pending, settle: Callable[[Ack], None]):
        self._control, self._board, self._pending, self._settle = control, board, pending, settle
        self._rank = control.rank
        self._payload = b""
        self._word = torch.zeros(3, dtype=torch.int64)
        self._told: AsyncCollective | None = None
        self.history: list[Applied] = []

    def begin(self, step: int, stop: bool) -> None:
        """Start telling (leader) or hearing what is pending; `stop` counts on the leader only."""
        if self._rank == LEADER:
            # Nothing is agreed on after the last step: it would be in force at a step that never runs.
            offer = None if stop else self._choose(step)
            self._payload = msgspec.msgpack.encode(offer) if offer else b""
            revision = offer.revision if offer else self._board.revision
            self._word = torch.tensor([revision, len(self._payload), int(stop)])
        self._told = self._control.start_broadcast(self._word, LEADER)

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
        except Exception as refusal:  # noqa: BLE001 - whatever a proposal does to a knob, training goes on
            self._settle(self._ack(command, "rejected", step, sentence(refusal)))
            return None
        return command

    def end(self, step: int) -> bool:
        """Agree on what was pending at the step's start. True when the run shall stop after this step."""
        if self._told:
            self._told.wait()
        revision, size, stop = self._word.tolist()
        if revision > self._board.revision and size:
            self._agree(self._share(size), step)
        return bool(stop)

    def _share(self, size: int) -> Command:
        payload = torch.zeros(size, dtype=torch.uint8)
        if self._rank == LEADER:
            payload = torch.frombuffer(bytearray(self._payload), dtype=torch.uint8)
        self._control.start_broadcast(payload, LEADER).wait()
        return msgspec.msgpack.decode(bytes(payload.tolist()), type=Command)

    def _agree(self, command: Command, step: int) -> None:
        why, prepared = "", []
        try:
            prepared = self._board.prepare(command.changes)
        except Exception as refusal:  # noqa: BLE001 - a rank that cannot prepare must still vote, or the others hang
            why = sentence(refusal)
        votes = [Vote.unpacked(row) for row in self._control.all_gather(Vote(why).packed())]
        against = [f"rank {rank}: {vote.why}" for rank, vote in enumerate(votes) if vote.why]
        if against:
            if self._rank == LEADER:
                self._settle(self._ack(command, "rejected", step, against[0]))
            return
        before = self._board.in_force(command.changes)
        self._board.commit(command.revision, command.changes, prepared)
        self.history.append(Applied(command.revision, step + 1, command.changes))
        self._settle(self._ack(command, "applied", step + 1, "", before))

    def _ack(
        self,
        command: Command,
        state: Literal["applied", "rejected", "expired"],
        step: int,
        why: str,
        before: Changes | None = None,
    ) -> Ack:
        return Ack(self._rank, command.revision, state, step, self._board.digest(), why, before or {})
