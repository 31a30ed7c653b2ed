"""Who watches a run, and what each may be sent next.

A client grants credit for a number of frames and says how far it has come; it gets that many, from there on,
as they fall due. Nothing is queued for a client beyond the snapshot it is in the middle of, so one that
stalls costs only itself: when it asks again it gets what it missed, or a snapshot if that is no longer kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from agents.sequence import Sequence
from agents.wire import Credit

HEARTBEAT_S = 1.0  # between frames to a client that waits, at most
FORGOTTEN_AFTER_S = 60.0  # a client that has granted no credit for so long
CLIENTS = 256
FRAMES_A_ROUND = 8  # to one client, before the others and the ranks get their turn


@dataclass
class _Client:
    seq: int
    frames: int
    heard_s: float
    sent_s: float
    follows: bool  # it has every update up to `seq`, so updates alone can serve it
    snapshot: list[bytes] = field(default_factory=list)  # frames yet to be sent, last first
    snapshot_seq: int = 0


class Audience:
    """All clients of a hub. `send(identity, frame)` is False when the client is full or has left."""

    def __init__(self, sequence: Sequence, send: Callable[[bytes, bytes], bool]) -> None:
        self._sequence = sequence
        self._send = send
        self._clients: dict[bytes, _Client] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._clients)

    def forget(self, identity: bytes) -> None:
        """Serve this client no more."""
        self._clients.pop(identity, None)

    def credit(self, identity: bytes, credit: Credit, now: float) -> str | None:
        """Take a client's credit; a sentence if it cannot be had as a client."""
        client = self._clients.get(identity)
        if client is None:
            if len(self._clients) >= CLIENTS:
                return (
                    f"this hub already serves {CLIENTS} clients, the most it takes; close one and try again"
                )
            client = self._clients[identity] = _Client(0, 0, now, now, follows=False)
        client.heard_s = now
        client.frames = credit.frames
        client.follows = self._sequence.holds(credit.epoch, credit.seq)
        client.seq = credit.seq
        if client.follows:
            client.snapshot = []
        return None

    def serve(self, now: float) -> bool:
        """Send every client what is due; True if there is more for one of them."""
        more = False
        for identity, client in list(self._clients.items()):
            if now - client.heard_s > FORGOTTEN_AFTER_S:
                del self._clients[identity]
            elif client.frames:
                more |= self._serve(identity, client, now)
        return more

    def _serve(self, identity: bytes, client: _Client, now: float) -> bool:
        budget = min(client.frames, FRAMES_A_ROUND)
        if not client.follows:
            if not client.snapshot:
                client.snapshot = self._sequence.snapshot()[::-1]
                client.snapshot_seq = self._sequence.seq
            while client.snapshot and budget and self._give(identity, client, client.snapshot[-1], now):
                client.snapshot.pop()
                budget -= 1
            if client.snapshot:
                return client.frames > 0
            client.follows, client.seq = True, client.snapshot_seq
        if not self._sequence.holds(self._sequence.epoch, client.seq):
            client.follows = False  # it fell behind what is kept, during its snapshot or for want of credit
            return client.frames > 0
        for seq, frame in self._sequence.frames_after(client.seq):
            if not budget or not self._give(identity, client, frame, now):
                return client.frames > 0
            client.seq = seq
            budget -= 1
        if budget and now - client.sent_s >= HEARTBEAT_S:
            self._give(identity, client, self._sequence.heartbeat(), now)
        return False

    def _give(self, identity: bytes, client: _Client, frame: bytes, now: float) -> bool:
        if not self._send(identity, frame):
            # Full or gone: what it still has to read will make it ask again, and it will say from where.
            client.frames = 0
            return False
        client.frames -= 1
        client.sent_s = now
        return True
