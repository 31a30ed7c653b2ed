"""What a rank remembers of commands, so that one delivered twice is carried out once."""

import threading
from collections import OrderedDict

from agents.protocol import Ack, Board, Command, Hello

REMEMBERED = 256  # acknowledgements
REPEATED = 16  # of them, said again to a hub that does not know this rank
WAITING = 64


class ReceivedCommands:
    """Commands not yet settled, and the acknowledgements of those that are; used by two threads."""

    def __init__(self) -> None:
        # Held for a few dictionary operations a command, never over a socket call.
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, Command] = OrderedDict()
        self._acks: OrderedDict[int, Ack] = OrderedDict()

    @property
    def oldest(self) -> Command | None:
        """The oldest command that waits. Asked at every step, so the usual answer takes no lock."""
        if not self._waiting:
            return None
        with self._lock:
            return next(iter(self._waiting.values()), None)

    def settle(self, ack: Ack) -> None:
        with self._lock:
            self._acks[ack.revision] = ack
            if len(self._acks) > REMEMBERED:
                self._acks.popitem(last=False)
            self._waiting.pop(ack.revision, None)

    def receive(self, command: Command, hello: Hello, board: Board | None) -> Ack | None:
        """Take a command from the hub; the acknowledgement, if it was settled before."""
        with self._lock:
            if command.revision in self._waiting:
                return None
            known = self._acks.get(command.revision)
            if known is None and command.revision <= hello.revision:
                # Settled by the process this one continues from: the knobs in force have it in them.
                known = Ack(
                    hello.rank, command.revision, "applied", hello.step, board.digest if board else "unknown"
                )
            if known is None and len(self._waiting) < WAITING:
                self._waiting[command.revision] = command
            return known

    def latest_acks(self) -> list[Ack]:
        """What to say again to a hub that may have been killed before it wrote them down."""
        with self._lock:
            return list(self._acks.values())[-REPEATED:]
