"""Packs messages into frames, in order; each frame takes as many messages as fit."""

from collections.abc import Callable, Iterable, Iterator

from agents.protocol.base import MESSAGE_BYTES


class FrameFiller:
    """Groups the packed messages of a queue into frames.

    `take` returns the next packed message, or None if the queue is currently empty.
    """

    def __init__(self, take: Callable[[], bytes | None]) -> None:
        self._take = take
        self.pending: bytes | None = None  # taken from the queue, but did not fit into the previous frame

    def fill(self, limit: int = MESSAGE_BYTES) -> list[bytes]:
        """Messages for the next frame, of at most `limit` bytes in total; a single message may exceed the limit."""
        packed: list[bytes] = []
        room = min(limit, MESSAGE_BYTES)
        while (message := self._next()) is not None:
            if packed and len(message) > room:
                self.pending = message
                break
            packed.append(message)
            room -= len(message)
        return packed

    def _next(self) -> bytes | None:
        pending, self.pending = self.pending, None
        return self._take() if pending is None else pending


def chunks(packed: Iterable[bytes], first: bytes = b"") -> Iterator[list[bytes]]:
    """Split a sequence of packed messages into chunks, each of which fits into one frame of at most `FRAME_BYTES`.
    Each chunk begins with the packed message `first`, if it is given."""
    messages = iter(packed)
    filler = FrameFiller(lambda: next(messages, None))
    while chunk := filler.fill(MESSAGE_BYTES - len(first)):
        yield [first, *chunk] if first else chunk
