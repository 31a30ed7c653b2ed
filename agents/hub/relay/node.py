"""The relay of one node: passes its ranks' messages to the hub in batches, and the hub's messages to its ranks.

ranks -> ipc -> relay -> ipc or TCP -> hub, with the same protocol on both sides. To its ranks, a relay acts as the hub.
To the hub, a relay is one connection that may send for all ranks that sent a hello message through it. A relay keeps no
state on disk: after a restart, it asks its ranks for their hello messages again.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

import zmq
from msgspec import structs

from agents import protocol
from agents.hub.relay.outbox import RelayOutbox
from agents.hub.telemetry.allowed_records import OfItself, OfTheJob
from agents.hub.telemetry.membership import SUCCESSION_S
from agents.protocol import (
    AnyMessage,
    Command,
    Event,
    Farewell,
    Gone,
    Hello,
    Message,
    Preview,
    Refused,
    Relay,
    Sample,
    StackQuery,
    Unknown,
    Welcome,
    WireError,
    codec,
)
from agents.rundir.local_machine import process_start, process_state, this_host
from agents.rundir.standard_streams import say
from agents.transport.reconnecting import ReconnectingSocket
from agents.transport.server_sockets import ServerSocket

FLUSH_MS = 20  # shortest interval between two batches to the hub
# In a large job the relays wait longer, so that the hub receives at most this many frames a second from all of them.
FRAMES_A_SECOND = 4096
LONGEST_FLUSH_S = 0.5
IDLE_MS = 200
FRAMES_PER_ROUND = 1024
WELCOME_S = 1.0  # minimum interval between two requests for the hellos of all ranks
REPORT_S = 5.0  # minimum interval between events about dropped messages
FORGOTTEN_AFTER_S = 60.0  # a rank that sends nothing for this long is removed
LEAVE_S = 0.5
# A supervised relay that is asked to end waits this long for the last messages of its ranks.
LAST_MESSAGES_S = 2.0


def flush_s(world: int, ranks: int) -> float:
    """Seconds between two batches of records from a relay with `ranks` ranks, in a job of `world` ranks."""
    relays = world / max(1, ranks)
    return min(LONGEST_FLUSH_S, max(FLUSH_MS / 1000, relays / FRAMES_A_SECOND))


@dataclass
class _Rank:
    peer: bytes
    hello: Hello
    heard_s: float


class Node:
    """The sockets and ranks of one relay; `run` returns after `stop`."""

    def __init__(self, run: str, hub_socket: ReconnectingSocket, server_socket: ServerSocket) -> None:
        self._introduction = Relay(protocol.VERSION, run, this_host(), os.getpid())
        self._hub_socket = hub_socket
        self._server_socket = server_socket
        self._epoch = secrets.token_hex(8)
        self._ranks: dict[int, _Rank] = {}
        self._by_peer: dict[bytes, int] = {}
        self._left: dict[int, bytes] = {}  # ranks that have left and wait for the hub's Farewell
        self._outbox = RelayOutbox(self._introduction)
        self._welcomed_s = -WELCOME_S
        self._reported_s = -REPORT_S
        self._refusal_text: str | None = None  # the hub's reason for refusing this relay
        self._stopping = False
        self._world = 1
        self._flush_due_s = 0.0  # monotonic time at which the next records are sent

    def stop(self) -> None:
        """Ask `run` to return; may be called from a signal handler."""
        self._stopping = True

    def run(self, parent: int | None = None) -> None:
        poller = zmq.Poller()
        poller.register(self._server_socket.socket, zmq.POLLIN)
        poller.register(self._hub_socket.socket, zmq.POLLIN)
        self._outbox.put(self._introduction)
        start = process_start(parent) if parent is not None else 0
        while not self._stopping:
            poller.poll(FLUSH_MS if self._outbox else IDLE_MS)
            self.turn(time.monotonic())
            if parent is not None and process_state(parent, start) == "ended":
                self.stop()
            if self._outbox:
                time.sleep(FLUSH_MS / 1000)  # wait, so that a batch has records of many ranks
        self._end(time.monotonic() + (LAST_MESSAGES_S if parent is not None else 0.0))
        self._hub_socket.close(int(1000 * LEAVE_S))
        self._server_socket.socket.close()

    def _end(self, deadline: float) -> None:
        """Forward messages until all ranks have left or `deadline` has passed."""
        ended = False
        while not ended:
            ended = not (self._ranks or self._left) or time.monotonic() >= deadline
            self._flush_due_s = 0.0
            self.turn(time.monotonic())
            if not ended:
                time.sleep(FLUSH_MS / 1000)

    def turn(self, now: float) -> None:
        """Receive frames of ranks and of the hub, handle them, and send the collected messages to the hub if one of
        them is urgent or if it is time for the next batch."""
        with contextlib.suppress(zmq.Again):
            for _ in range(FRAMES_PER_ROUND):
                received = self._server_socket.receive()
                self._from_rank(received.peer, received.frames, now)
        with contextlib.suppress(zmq.Again):
            for _ in range(FRAMES_PER_ROUND):
                self._from_hub(self._hub_socket.socket.recv(zmq.NOBLOCK), now)
        self._hub_socket.check_handshakes()
        if self._hub_socket.refusal != self._refusal_text:
            self._refusal_text = self._hub_socket.refusal
            self._report_refusal()
        lost = 0
        if self._outbox.urgent or now >= self._flush_due_s:
            self._flush_due_s = now + flush_s(self._world, len(self._ranks))
            lost = self._outbox.flush(self._send)
        if lost:
            where = f"the relay on {self._introduction.host}"
            text = (
                f"{where} dropped {lost} message{'s' * (lost != 1)} because the hub was slow; it now sends "
                f"only the newest records of each rank"
            )
            self._outbox.put(Event(time.time(), "warning", self._any_rank(), text))
        for rank in [rank for rank, one in self._ranks.items() if now - one.heard_s > FORGOTTEN_AFTER_S]:
            self._forget(rank)

    def _report_refusal(self) -> None:
        why = self._refusal_text
        if why:
            say(f"the relay on {self._introduction.host}: {protocol.clean(why)}\n")
            self._send_to(self._peers([]), Refused(protocol.clip(why)))

    def _any_rank(self) -> str:
        return f"rank {next(iter(self._ranks), 0)}"

    def _send(self, frame: bytes) -> bool:
        try:
            self._hub_socket.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # --------------------------------------------------------------------------------------------- from ranks

    def _from_rank(self, peer: bytes, frames: list[bytes], now: float) -> None:
        try:
            if len(frames) != 1:
                raise WireError(f"a message has one frame, and this one has {len(frames)}")
            messages = codec.decode_each(frames[0])
        except WireError as error:
            self._send_to([peer], Refused(protocol.clip(str(error))))
            return
        for message in messages:
            if isinstance(message, Hello):
                refusal = self._register(peer, message, now)
                if refusal:
                    self._send_to([peer], Refused(protocol.clip(refusal)))
                    return
            rank = self._by_peer.get(peer)
            if rank is None and isinstance(message, Unknown) and message.why:
                self._send_to([peer], Refused(protocol.clip(f"not a frame of this protocol: {message.why}")))
                return
            if rank is None:
                self._send_to([peer], Welcome(self._epoch))
                return
            self._ranks[rank].heard_s = now
            if not self._is_allowed(rank, message):
                self._report_dropped(rank, message, now)
                continue
            if isinstance(message, Event):
                message = structs.replace(message, source=f"rank {rank}")
            self._outbox.put(message)
            if isinstance(message, Gone):
                self._left[rank] = peer
                self._forget(rank)

    def _is_allowed(self, rank: int, message: AnyMessage) -> bool:
        """Whether the rank may send this message. The relay checks each message itself: one forbidden message would
        make the hub refuse the relay's whole batch.
        """
        if isinstance(message, OfTheJob):
            return rank == 0 or self._ranks[rank].hello.leader
        if isinstance(message, Hello | OfItself):
            return message.rank == rank
        return isinstance(message, Event)

    def _report_dropped(self, rank: int, message: AnyMessage, now: float) -> None:
        """Report a dropped message to the hub, at most once every `REPORT_S` seconds. A message of an unknown, newer
        kind is not reported.
        """
        if isinstance(message, Unknown):
            what = f"an invalid {message.kind}: {message.why}" if message.why else ""
        else:
            what = f"a {type(message).__name__.lower()}, which it may not send"
        if what and now - self._reported_s >= REPORT_S:
            self._reported_s = now
            text = protocol.clip(f"the rank sent {what}; dropped")
            self._outbox.put(Event(time.time(), "warning", f"rank {rank}", text))

    def _register(self, peer: bytes, hello: Hello, now: float) -> str | None:
        """Register a rank; returns a refusal if another process is already registered as this rank."""
        other = self._ranks.get(hello.rank)
        if other and other.peer != peer and now - other.heard_s < SUCCESSION_S:
            was = other.hello
            if was.process != hello.process:
                return f"rank {hello.rank} is already connected, as process {was.pid} on {was.host}"
        before = self._by_peer.get(peer)
        if before is not None and before != hello.rank:
            self._forget(before)
        known = self._ranks.get(hello.rank)
        if known:
            self._by_peer.pop(known.peer, None)
        self._ranks[hello.rank] = _Rank(peer, hello, now)
        self._world = hello.world
        self._by_peer[peer] = hello.rank
        if self._refusal_text:
            self._send_to([peer], Refused(protocol.clip(self._refusal_text)))
        return None

    def _forget(self, rank: int) -> None:
        self._by_peer.pop(self._ranks.pop(rank).peer, None)

    # --------------------------------------------------------------------------------------------- from the hub

    def _from_hub(self, frame: bytes, now: float) -> None:
        try:
            messages = codec.decode_each(frame)
        except WireError:
            return  # the hub is of an incompatible release; the ranks continue as without a hub
        for message in messages:
            self._pass_down(message, now)

    def _pass_down(self, message: AnyMessage, now: float) -> None:
        match message:
            case Welcome(ranks=ranks):
                # A hub that has restarted answers each frame with a request for the hellos of all ranks.
                if not ranks and now - self._welcomed_s < WELCOME_S:
                    return
                if not ranks:
                    self._welcomed_s = now
                self._send_to(self._peers(ranks), Welcome(message.epoch))
            case Farewell(ranks=ranks):
                for left in ranks:
                    if left in self._left:
                        self._send_to([self._left.pop(left)], Farewell([left]))
            case Refused(rank=rank):
                self._send_to(self._peers([] if rank is None else [rank]), Refused(message.why))
            case Sample(ranks=ranks) | StackQuery(ranks=ranks):
                self._send_to(self._peers(ranks), message)
            case Command() | Preview():
                self._send_to([one.peer for one in self._ranks.values() if one.hello.leader], message)

    def _peers(self, ranks: Iterable[int]) -> list[bytes]:
        """The socket identities of those `ranks` that are on this node; if `ranks` is empty, of all ranks on this
        node."""
        named = list(ranks) or list(self._ranks)
        return [self._ranks[rank].peer for rank in named if rank in self._ranks]

    def _send_to(self, peers: Iterable[bytes], message: Message) -> None:
        frame = codec.encode([message])
        for peer in peers:
            self._server_socket.send(peer, frame)
