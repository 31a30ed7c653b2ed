"""Remembers the commands that a rank has received, so that a command delivered twice is applied only once."""

import threading
from collections import OrderedDict

from agents.protocol import Ack, Board, Command, Hello

REMEMBERED = 256  # number of acknowledgements kept
REPEATED = 16  # number of acknowledgements sent again to a hub that does not know this rank
PENDING = 64


class ReceivedCommands:
    """The commands that this rank has not acknowledged yet, and its latest acknowledgements; used by two threads."""

    def __init__(self) -> None:
        # The lock is held only for a few dictionary operations, never during a socket call.
        self._lock = threading.Lock()
        self._pending: OrderedDict[int, Command] = OrderedDict()
        self._acks: OrderedDict[int, Ack] = OrderedDict()

    @property
    def oldest(self) -> Command | None:
        """The oldest command that this rank has not acknowledged yet. The training loop reads this property at every
        step, so it takes no lock if no command is pending."""
        if not self._pending:
            return None
        with self._lock:
            return next(iter(self._pending.values()), None)

    def settle(self, ack: Ack) -> None:
        with self._lock:
            self._acks[ack.revision] = ack
            if len(self._acks) > REMEMBERED:
                self._acks.popitem(last=False)
            self._pending.pop(ack.revision, None)

    def receive(self, command: Command, hello: Hello, board: Board | None) -> Ack | None:
        """Add a command from the hub to the pending commands. If this rank has already acknowledged the command, return
        that acknowledgement instead."""
        with self._lock:
            if command.revision in self._pending:
                return None
            known = self._acks.get(command.revision)
            if known is None and command.revision <= hello.revision:
                # The process that this one resumes has already applied the command; the current knob values
                # include it.
                known = Ack(
                    hello.rank, command.revision, "applied", hello.step, board.digest if board else "unknown"
                )
            if known is None and len(self._pending) < PENDING:
                self._pending[command.revision] = command
            return known

    def latest_acks(self) -> list[Ack]:
        """The latest acknowledgements, to be sent again because an earlier hub may have been killed before it stored
        them.
        """
        with self._lock:
            return list(self._acks.values())[-REPEATED:]
