"""The bounded queue between the trainer's thread and the agent's thread. `put` never blocks; a full queue drops its
oldest message.
"""

import time
from collections import deque

from msgspec import structs

from agents import protocol
from agents.protocol import (
    Ack,
    Board,
    Event,
    Experts,
    Gone,
    Hello,
    Message,
    Peers,
    Previewed,
    RankStacks,
    Timeline,
    WireError,
    codec,
)
from agents.transport.frame_filling import FrameFiller

# Messages are queued in lanes, which are sent in this order. Each lane has its own capacity, so that records cannot
# displace urgent messages, and large vectors cannot displace records.
URGENT, RECORDS, BULK = range(3)
CAPACITY = (512, 2048, 16)
LANE: dict[type[Message], int] = {
    Hello: URGENT,
    Board: URGENT,
    Ack: URGENT,
    Gone: URGENT,
    Previewed: URGENT,
    RankStacks: URGENT,
    Experts: BULK,
    Timeline: BULK,
    Peers: BULK,
}


class Outbox:
    """The trainer's thread adds messages; the agent's thread adds and removes messages. No lock is needed, because
    `append` and `popleft` of a deque are atomic. If both threads drop a message at the same time, the count of dropped
    messages may be one too low.
    """

    def __init__(self) -> None:
        self._lanes: tuple[deque[Message], ...] = tuple(deque() for _ in CAPACITY)
        self._displaced = 0  # number of messages dropped because the queue was full
        self._unsendable = 0  # number of messages dropped because they could not be encoded
        self.problem: str | None = None  # why a message could not be encoded
        # Monotonic start time of this process, if its Hello contains a start time.
        self.began_s: float | None = None
        self._frames = FrameFiller(self._take)

    @property
    def lost(self) -> int:
        """Number of messages dropped because the queue was full or because they could not be encoded."""
        return self._displaced + self._unsendable

    @property
    def waiting(self) -> int:
        """Number of queued messages."""
        return sum(map(len, self._lanes)) + (self._frames.pending is not None)

    def put(self, message: Message) -> None:
        lane = LANE.get(type(message), RECORDS)
        queue = self._lanes[lane]
        if len(queue) >= CAPACITY[lane]:
            try:
                queue.popleft()
                self._displaced += 1
            except IndexError:  # the other thread has just emptied the queue
                pass
        queue.append(message)

    def failed(self, why: str) -> None:
        """Report a failure as an event; only the first failure is reported."""
        if self.problem is None:
            self.problem = protocol.clip(why)
            self.put(Event(time.time(), "error", "agent", self.problem))

    def frame(self) -> bytes | None:
        """The next frame to send, oldest messages first; None if the queue is empty."""
        packed = self._frames.fill()
        return codec.frame(packed) if packed else None

    def _aged(self, message: Message) -> Message:
        """Update `age_s` of a Hello, because the Hello may have waited in the queue. Other messages are unchanged."""
        if isinstance(message, Hello) and self.began_s is not None:
            return structs.replace(message, age_s=time.monotonic() - self.began_s)
        return message

    def _take(self) -> bytes | None:
        for queue in self._lanes:
            while queue:
                try:
                    return codec.pack(self._aged(queue.popleft()))
                except IndexError:  # the trainer's thread has just dropped the last message
                    break
                except WireError as error:
                    self._unsendable += 1
                    if self.problem is None:
                        # Only the first failure is reported, because the cause is a mistake in the program; all are
                        # counted.
                        self.problem = protocol.clip(str(error))
                        return codec.pack(Event(time.time(), "error", "agent", self.problem))
        return None
