"""The relay's bounded outbox to a hub that may be slow or absent. If the outbox holds too many messages, only the
newest record of each rank and kind is kept.

Each frame that contains the hello message of a rank begins with a message in which the relay introduces itself.
Otherwise, a hub that has restarted since the last frame would treat the relay's connection as the connection of a
single rank, and refuse the other ranks.
"""

from collections import deque
from collections.abc import Callable

from agents.protocol import Hello, Message, Record, Relay, WireError, codec
from agents.protocol.base import MESSAGE_BYTES
from agents.transport.frame_filling import FrameFiller

# Maximum number of messages kept in order; above it, only the newest record of each rank and kind is kept.
PATIENCE = 16_384
KEPT = 4096  # maximum number of records, and of other messages, above `PATIENCE`; the oldest are dropped


class RelayOutbox:
    """`put` never waits. `flush` sends frames of at most 256 KiB and returns how many messages were dropped."""

    def __init__(self, introduction: Relay) -> None:
        self._introduction = codec.pack(introduction)
        self._hello_taken = False  # whether the next frame has a hello
        self._last_is_hello = False  # whether the message taken last is a hello
        self._queue: deque[Message] = deque()
        self._unsent: bytes | None = None  # a frame that the socket has not accepted yet
        self._lost = 0
        self.urgent = False  # whether the queue has messages other than records, which are sent without delay
        self._frames = FrameFiller(self._take)

    def __bool__(self) -> bool:
        return bool(self._queue or self._unsent or self._frames.pending)

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: Message) -> None:
        self._queue.append(message)
        self.urgent = self.urgent or not isinstance(message, Record)
        if len(self._queue) > PATIENCE:
            self._thin()

    def _thin(self) -> None:
        kept: deque[Message] = deque()
        seen: set[tuple[type[Message], int]] = set()
        others = 0
        for message in reversed(self._queue):
            if isinstance(message, Record):
                key = (type(message), message.rank)
                if key in seen or len(seen) == KEPT:
                    continue
                seen.add(key)
            else:
                others += 1
                if others > KEPT:
                    continue
            kept.appendleft(message)
        self._lost += len(self._queue) - len(kept)
        self._queue = kept

    def flush(self, send: Callable[[bytes], bool]) -> int:
        """Send until the queue is empty or `send` returns False. Returns the number of messages dropped since the last
        report. If `send` returns False, `flush` returns 0, and a later call reports the dropped messages.
        """
        while (frame := self._unsent or self._frame()) is not None:
            if not send(frame):
                self._unsent = frame
                return 0
            self._unsent = None
        self.urgent = False
        lost, self._lost = self._lost, 0
        return lost

    def _frame(self) -> bytes | None:
        packed = self._frames.fill(MESSAGE_BYTES - len(self._introduction))
        if self._hello_taken:
            packed = [self._introduction, *packed]
        # The message taken last may have been left for the next frame.
        self._hello_taken = self._last_is_hello and self._frames.pending is not None
        return codec.frame(packed) if packed else None

    def _take(self) -> bytes | None:
        while self._queue:
            message = self._queue.popleft()
            self._last_is_hello = isinstance(message, Hello)
            self._hello_taken = self._hello_taken or self._last_is_hello
            try:
                return codec.pack(message)
            except WireError:  # too large for a frame; dropped, so that it does not block the others
                self._lost += 1
        return None
