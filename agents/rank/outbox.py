"""The bounded queue between a trainer and its agent's thread: putting never waits, the oldest gives way."""

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
    Timeline,
    WireError,
    codec,
)
from agents.protocol.frame_filling import FrameFiller

# Which messages share a queue, and how many it holds. In order of sending: what must arrive is not displaced
# by records, and records are not displaced by what is large.
URGENT, RECORDS, BULK = range(3)
CAPACITY = (512, 2048, 16)
LANE: dict[type[Message], int] = {
    Hello: URGENT,
    Board: URGENT,
    Ack: URGENT,
    Gone: URGENT,
    Previewed: URGENT,
    Experts: BULK,
    Timeline: BULK,
    Peers: BULK,
}


class Outbox:
    """The trainer's thread puts, its agent's puts and takes; no lock, because a deque's append and popleft are atomic.

    Only the count of what was lost may miss one, if both displace at the same moment.
    """

    def __init__(self) -> None:
        self._lanes: tuple[deque[Message], ...] = tuple(deque() for _ in CAPACITY)
        self._displaced = 0  # counted by those that put
        self._unsendable = 0  # counted by the thread that takes
        self.problem: str | None = None  # why a message could not be sent at all
        self.began_s: float | None = None  # monotonic; when this process of the run began, if it has said so
        self._frames = FrameFiller(self._take)

    @property
    def lost(self) -> int:
        """Messages dropped, since the queue was full or they could not be sent at all."""
        return self._displaced + self._unsendable

    def put(self, message: Message) -> None:
        lane = LANE.get(type(message), RECORDS)
        queue = self._lanes[lane]
        if len(queue) >= CAPACITY[lane]:
            try:
                queue.popleft()
                self._displaced += 1
            except IndexError:  # the other thread has just emptied it
                pass
        queue.append(message)

    def failed(self, why: str) -> None:
        """Tell people what went wrong with sending, once; the first word stands."""
        if self.problem is None:
            self.problem = protocol.clip(why)
            self.put(Event(time.time(), "error", "agent", self.problem))

    def frame(self) -> bytes | None:
        """Take what one frame holds, oldest first; None when there is nothing."""
        packed = self._frames.fill()
        return codec.frame(packed) if packed else None

    def _aged(self, message: Message) -> Message:
        """A Hello may have waited for a hub: its age is of now."""
        if isinstance(message, Hello) and self.began_s is not None:
            return structs.replace(message, age_s=time.monotonic() - self.began_s)
        return message

    def _take(self) -> bytes | None:
        for queue in self._lanes:
            while queue:
                try:
                    return codec.pack(self._aged(queue.popleft()))
                except IndexError:  # displaced at this moment
                    break
                except WireError as error:
                    self._unsendable += 1
                    if self.problem is None:
                        # Once, for it is a mistake in a program; the count goes on.
                        self.problem = protocol.clip(str(error))
                        return codec.pack(Event(time.time(), "error", "agent", self.problem))
        return None
