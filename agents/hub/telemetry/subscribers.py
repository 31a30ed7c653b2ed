"""Subscribers of a run, and which frames the hub sends to each of them.

A client grants credit for a number of frames and states the sequence number of its last update; the hub then sends up
to that many frames with the following updates. The hub queues nothing per client except the rest of a snapshot, so a
stalled client does not affect other clients. A client that grants credit again gets the updates that it missed, or only
the latest values if the log no longer has these updates. A client may also request only the latest values at a given
rate (see `LatestFrames`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from agents.hub.telemetry.latest_frames import LatestFrames
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Credit

HEARTBEAT_S = 1.0  # maximum interval between frames to a client with credit
FORGOTTEN_AFTER_S = 60.0  # a client that grants no credit for this long is removed
CLIENTS = 256
# Maximum number of clients per key, so that the holder of one key cannot keep all others out.
CLIENTS_PER_KEY = 32
VIEWERS = 192  # maximum number of clients with a viewer key; the others are reserved for operators
SNAPSHOT_PERIOD_S = 1.0  # minimum interval between two snapshots to one client; maximum age of a cached one
FRAMES_PER_ROUND = 8  # maximum number of frames to one client per round, so that others are served too


class _Snapshot(NamedTuple):
    built_s: float
    seq: int
    frames: list[bytes]


@dataclass
class _Client:
    heard_s: float
    sent_s: float
    request: Credit
    key: str  # name of its key; "" over ipc
    viewer: bool  # whether its key has the viewer role
    seq: int = 0
    frames: int = 0
    follows: bool = False  # the client has every update up to `seq`, or newer values
    snapshot: list[bytes] = field(default_factory=list)  # unsent frames, last first
    snapshot_seq: int = 0
    snapshot_due_s: float = 0.0  # earliest time of the next snapshot
    latest_frames: LatestFrames | None = None
    due_s: float = 0.0  # when to send the next frame, if the client requested a rate


class Subscribers:
    """All clients of a hub. `send(identity, frame)` returns False if the client has left or its queue is full."""

    def __init__(self, update_log: UpdateLog, send: Callable[[bytes, bytes], bool]) -> None:
        self._update_log = update_log
        self._send = send
        self._clients: dict[bytes, _Client] = {}
        self._ending = False  # whether the hub ends, so that requested rates no longer count
        self._built: dict[bool, _Snapshot] = {}  # the newest snapshots, with (True) and without rank detail

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._clients)

    def forget(self, identity: bytes) -> None:
        """Stop serving a client."""
        self._clients.pop(identity, None)

    def credit(
        self, identity: bytes, credit: Credit, now: float, key: str = "", viewer: bool = False
    ) -> str | None:
        """Handle a message in which a client grants credit. The first such message of a client also makes it a
        subscriber. If a limit on the number of clients is reached, a new client is not accepted, and the reason is
        returned."""
        client = self._clients.get(identity)
        if client is None:
            full = self._limit_reached(key, viewer)
            if full:
                return f"this hub already serves {full}, the maximum; close one and try again"
            client = self._clients[identity] = _Client(now, now, credit, key, viewer)
        client.heard_s = now
        client.request, client.frames = credit, credit.frames
        newest = self._update_log.newest.reaches <= credit.seq <= self._update_log.seq
        client.follows = credit.epoch == self._update_log.epoch and newest
        if client.seq != credit.seq or not client.follows:
            client.seq, client.latest_frames = credit.seq, None
        if client.follows:
            client.snapshot = []
        return None

    def _limit_reached(self, key: str, viewer: bool) -> str | None:
        """The limit that a new client would exceed, as text such as ``256 clients``; None if the client can be
        admitted."""
        clients = self._clients.values()
        if len(clients) >= CLIENTS:
            return f"{CLIENTS} clients"
        if key and sum(client.key == key for client in clients) >= CLIENTS_PER_KEY:
            return f"{CLIENTS_PER_KEY} clients under the key {key}"
        if viewer and sum(client.viewer for client in clients) >= VIEWERS:
            return f"{VIEWERS} clients with the role viewer"
        return None

    def end(self) -> None:
        """Serve all clients without delay from now on, because the hub ends. Otherwise, a client that requested a rate
        would not get the last steps and the end of the run."""
        self._ending = True

    def serve(self, now: float) -> bool:
        """Send each client the updates that it lacks, as far as its credit and its requested rate allow; returns True
        if there is more to send now."""
        more = False
        for identity, client in list(self._clients.items()):
            if now - client.heard_s > FORGOTTEN_AFTER_S:
                del self._clients[identity]
            elif client.frames:
                more |= self._serve(identity, client, now)
        return more

    def _serve(self, identity: bytes, client: _Client, now: float) -> bool:
        """Send one client the updates that it lacks, as far as its credit and its requested rate allow; returns True if
        there is more to send now."""
        if not client.follows and not self._send_snapshot(identity, client, now):
            return bool(client.snapshot) and client.frames > 0
        if client.seq < self._update_log.newest.reaches:
            # The log no longer has the next updates: the client was slow or gave no credit.
            client.follows = False
            return client.frames > 0
        thinned = client.request.hz or not client.request.ranks or client.latest_frames
        if thinned or not self._update_log.holds(self._update_log.epoch, client.seq):
            more = self._send_latest(identity, client, now)
        else:
            more = self._send_all(identity, client, now)
        if not more and client.frames and now - client.sent_s >= HEARTBEAT_S:
            self._send_frame(identity, client, self._update_log.heartbeat(client.seq), now)
        return more and client.frames > 0

    def _send_snapshot(self, identity: bytes, client: _Client, now: float) -> bool:
        """Send frames of the snapshot; returns True once the whole snapshot has been sent to the client."""
        if not client.snapshot:
            if now < client.snapshot_due_s:
                return False
            found = self._snapshot(client.request.ranks, now, again=client.snapshot_due_s > 0)
            client.snapshot, client.snapshot_seq = found.frames[::-1], found.seq
            client.snapshot_due_s = now + SNAPSHOT_PERIOD_S
        for _ in range(min(client.frames, FRAMES_PER_ROUND)):
            if not client.snapshot or not self._send_frame(identity, client, client.snapshot[-1], now):
                break
            client.snapshot.pop()
        if client.snapshot:
            return False
        client.follows, client.seq, client.latest_frames = True, client.snapshot_seq, None
        return True

    def _snapshot(self, ranks: bool, now: float, again: bool) -> _Snapshot:
        """A snapshot of the run's current state, as frames to send. A client that had a snapshot before may get a
        recent, cached one, because building a snapshot delays all clients.
        """
        known = self._built.get(ranks)
        recent = (
            known and now - known.built_s < SNAPSHOT_PERIOD_S and known.seq >= self._update_log.newest.reaches
        )
        if known is None or not (again and recent):
            frames = self._update_log.snapshot(ranks)
            known = self._built[ranks] = _Snapshot(now, self._update_log.seq, frames)
        return known

    def _send_all(self, identity: bytes, client: _Client, now: float) -> bool:
        budget = min(client.frames, FRAMES_PER_ROUND)
        for seq, frame in self._update_log.frames_after(client.seq):
            if not budget or not self._send_frame(identity, client, frame, now):
                return True
            client.seq = seq
            budget -= 1
        return False

    def _send_latest(self, identity: bytes, client: _Client, now: float) -> bool:
        request = client.request
        if (now < client.due_s and not self._ending) or (
            client.latest_frames is None and client.seq == self._update_log.seq
        ):
            return False
        client.latest_frames = client.latest_frames or LatestFrames(
            self._update_log, client.seq, request.ranks
        )
        frames = 1 if request.frame_bytes else min(client.frames, FRAMES_PER_ROUND)
        for _ in range(frames):
            if not self._send_frame(identity, client, client.latest_frames.frame(request.frame_bytes), now):
                # `seq` is unchanged, so the next call builds the unsent frame again.
                client.latest_frames = None
                return True
            if client.latest_frames.done:
                client.seq, client.latest_frames = client.latest_frames.reaches, None
                break
        if request.hz and not self._ending and (client.latest_frames is None or request.frame_bytes):
            client.due_s = now + 1 / request.hz
            return False
        return client.latest_frames is not None

    def _send_frame(self, identity: bytes, client: _Client, frame: bytes, now: float) -> bool:
        if not self._send(identity, frame):
            # The client's queue is full, or the client has left. After reading, it grants credit again and states its
            # sequence number.
            client.frames = 0
            return False
        client.frames -= 1
        client.sent_s = now
        return True
