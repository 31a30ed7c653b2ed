"""Sends the telemetry of many ranks from one process, for example from a simulation, and receives commands for them. To
the hub, the process looks like a relay.

No thread is started, so the caller must call `turn` regularly. The caller builds the frames and may encode many records
at once (`codec.frame_of_joined`).
"""

import os
import time
from collections import deque
from collections.abc import Collection, Iterable

import zmq
from msgspec import structs

from agents import protocol
from agents.protocol import (
    PREVIEWS,
    Ack,
    AnyMessage,
    Board,
    Command,
    Farewell,
    Gone,
    Hello,
    Message,
    Preview,
    Previewed,
    Refused,
    Relay,
    Sample,
    Welcome,
    WireError,
    codec,
)
from agents.rank.errors import sentence
from agents.rank.hub_link import FIRST_S, LAST_S, Previewer, log
from agents.rank.received_commands import ReceivedCommands
from agents.rank.sampling import EVERY, Sampling
from agents.rundir.local_machine import this_host
from agents.transport.curve_keys import Key
from agents.transport.frame_filling import chunks
from agents.transport.reconnecting import ReconnectingSocket

FRAMES_QUEUED = 512  # maximum number of queued frames, each of at most 256 KiB
FRAMES_A_TURN = 4096
HIGH_WATER = 64
ACKS_REPEATED = 4  # number of newest commands whose acks are sent again to a restarted hub
UNASKED = 4096  # maximum number of ranks whose all-to-all bytes are sent without a request
INTRODUCED_PAUSE_S = 1.0  # minimum time between two introductions, because a hub may ask once per frame
HELLO_PAUSE_S = 0.2  # the same for the hello of a single rank


class ManyRanks:
    """One connection to a hub, shared by many ranks. Without an endpoint nothing is sent and no command arrives.

    `introduce` sets the `Hello` message of each rank; these messages are sent at once, and again whenever a hub
    requests them.
    """

    def __init__(self, run: str, endpoint: str | None, key: Key | None = None) -> None:
        self._relay = Relay(protocol.VERSION, run, this_host(), os.getpid())
        self._hellos: dict[int, Hello] = {}
        self._board: Board | None = None
        self._silent: frozenset[int] = frozenset()
        self._commands = ReceivedCommands()
        self._acks: deque[list[Ack]] = deque(maxlen=ACKS_REPEATED)
        # Each frame, and whether a full queue may drop it.
        self._frames: deque[tuple[bytes, bool]] = deque()
        self._began_s = time.monotonic()
        self._introduced_s = -INTRODUCED_PAUSE_S
        self._hello_s: dict[int, float] = {}  # when each rank's hello was queued last
        self._sampling = Sampling()
        # Rank -> steps between the `peers` vectors that a client requests, and the end of the request.
        self._leases: dict[int, tuple[int, float]] = {}
        self.preview: Previewer | None = None
        self.lost_frames = 0
        self.refused: str | None = None
        self._leaving: set[int] = set()  # ranks whose Gone the hub has not confirmed
        self._connected = False  # whether a frame was sent to the hub
        self._line: ReconnectingSocket | None = None
        if endpoint is not None:
            self._line = ReconnectingSocket(
                endpoint, key, immediate=True, high_water=HIGH_WATER, reconnect_max_ms=2000
            )

    @property
    def attached(self) -> bool:
        """Whether a hub endpoint was given and the connection is still open."""
        return self._line is not None

    @property
    def queued(self) -> int:
        """Number of frames that are queued and not sent yet."""
        return len(self._frames)

    # ------------------------------------------------------------------------------------------- ranks

    def introduce(self, hellos: Iterable[Hello], board: Board) -> None:
        """Set the `Hello` message of each rank and the leader's knob board, and send them to the hub. Call this method
        again after each applied change, before `settle`, so that subscribers get the new board before the acks."""
        extra = [PREVIEWS] if self.preview else []
        self._hellos = {
            hello.rank: structs.replace(hello, capabilities=[*hello.capabilities, *extra * hello.leader])
            for hello in hellos
        }
        self._board = board
        self._introduce(self._hellos)

    def silence(self, ranks: Collection[int]) -> None:
        """Stop sending for `ranks`, and only for these, as if their machines had failed. A rank that is no longer
        silent sends its `Hello` again. The caller must not send records of silent ranks."""
        back = self._silent.difference(ranks)
        self._silent = frozenset(ranks)
        self._introduce(back)

    def _introduce(self, ranks: Iterable[int]) -> None:
        """Send the `Hello` messages of `ranks`. Each frame begins with a `Relay` message; without it, a hub that has
        restarted since the last frame would take this connection for that of a single rank."""
        age = time.monotonic() - self._began_s
        sent = [rank for rank in ranks if rank in self._hellos and rank not in self._silent]
        messages: list[Message] = [structs.replace(self._hellos[rank], age_s=age) for rank in sent]
        if self._board and any(self._hellos[rank].leader for rank in sent):
            messages.append(self._board)
        self._hello_s |= dict.fromkeys(sent, time.monotonic())
        wanted = set(sent)
        messages += [ack for acks in self._acks for ack in acks if ack.rank in wanted]
        messages += [Gone(rank, clean=True) for rank in sent if rank in self._leaving]
        self._send(messages, codec.pack(self._relay))

    # ------------------------------------------------------------------------------------------- sending

    def send(self, messages: Iterable[Message]) -> None:
        """Queue messages, in order."""
        queued = list(messages)
        self._leaving.update(message.rank for message in queued if isinstance(message, Gone))
        self._send(queued)

    def _send(self, messages: Iterable[Message], first: bytes = b"") -> None:
        if self._line is None:
            return
        for chunk in chunks(map(codec.pack, messages), first):
            self._queue(codec.frame(chunk), droppable=not first)

    def send_frame(self, frame: bytes) -> None:
        """Queue an encoded frame of records; a full queue drops its oldest frame of records."""
        if self._line is not None:
            self._queue(frame, droppable=True)

    def _queue(self, frame: bytes, droppable: bool) -> None:
        # Introductions are never dropped: without them, the hub would refuse the records that follow.
        if len(self._frames) >= FRAMES_QUEUED:
            oldest = next((place for place, (_, may) in enumerate(self._frames) if may), None)
            if oldest is not None:
                del self._frames[oldest]
                self.lost_frames += 1
        self._frames.append((frame, droppable))

    def turn(self, timeout_s: float = 0.0) -> None:
        """Send queued frames and handle messages from the hub. Waits at most `timeout_s` until a frame can be sent or
        received."""
        line = self._line
        if line is None:
            time.sleep(timeout_s)
            return
        self._flush(line)
        if timeout_s > 0:
            wanted = zmq.POLLIN | (zmq.POLLOUT if self._frames else 0)
            line.socket.poll(int(1000 * timeout_s) or 1, wanted)
            self._flush(line)
        line.check_handshakes()
        self.refused = line.refusal or self.refused
        self._receive(line)
        self._flush(line)

    def close(self, linger_s: float | None = None) -> None:
        """Send the queued frames, wait until the hub has taken the `Gone` messages in them, and close the connection. A
        second call does nothing. Waits at most `linger_s` seconds, by default as long as `HubLink.leave` does. If the
        hub does not confirm in time, this is logged.
        """
        line = self._line
        if line is None:
            return
        if linger_s is None:
            linger_s = LAST_S if self._connected else FIRST_S
        deadline = time.monotonic() + linger_s
        self._flush(line)
        while (self._frames or self._leaving) and not self.refused:
            if time.monotonic() >= deadline:
                log.warning(
                    "the hub did not take the last records of %d ranks within %.1f s, so the run may not show them",
                    len(self._leaving),
                    linger_s,
                )
                break
            line.socket.poll(50, zmq.POLLIN | (zmq.POLLOUT if self._frames else 0))
            self._receive(line)
            self._flush(line)
        self._line = None
        line.close(max(0, int(1000 * (deadline - time.monotonic()))))

    def _flush(self, line: ReconnectingSocket) -> None:
        while self._frames:
            try:
                line.socket.send(self._frames[0][0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._frames.popleft()
            self._connected = True

    # ----------------------------------------------------------------------------------------- commands

    @property
    def pending(self) -> Command | None:
        """The oldest command whose outcome has not been passed to `settle` yet."""
        return self._commands.oldest

    def settle(self, acks: list[Ack]) -> None:
        """Report the outcome of a command on all ranks, the leader's ack first."""
        self._commands.settle(acks[0])
        self._acks.append(acks)
        self.send(ack for ack in acks if ack.rank not in self._silent)

    def wants(self, kind: str, step: int) -> bool:
        """Whether to send a sample of `kind` ("experts" or "timeline") for this step."""
        return self.attached and self._sampling.due(kind, step)

    def peers_wanted(self, step: int) -> list[int]:
        """The ranks that must report, for this step, how many all-to-all bytes they sent to each destination rank. In a
        run with at most `UNASKED` ranks, all ranks report these numbers every `EVERY` steps. In all other cases, a rank
        reports them only if a client has requested them.
        """
        now = time.monotonic()
        self._leases = {rank: lease for rank, lease in self._leases.items() if lease[1] > now}
        if step % EVERY == 0 and len(self._hellos) <= UNASKED:
            return [rank for rank in self._hellos if rank not in self._silent]
        return [
            rank
            for rank, (every, _) in self._leases.items()
            if step % every == 0 and rank not in self._silent
        ]

    def _receive(self, line: ReconnectingSocket) -> None:
        for _ in range(FRAMES_A_TURN):
            try:
                messages = codec.decode_each(line.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except WireError as error:
                self.refused = str(error)
                continue
            for message in messages:
                self._take(message)

    def _take(self, message: AnyMessage) -> None:
        match message:
            case Welcome(ranks=ranks):
                if ranks:
                    due = time.monotonic() - HELLO_PAUSE_S
                    self._introduce(rank for rank in ranks if self._hello_s.get(rank, due) <= due)
                elif time.monotonic() - self._introduced_s >= INTRODUCED_PAUSE_S:
                    self._introduced_s = time.monotonic()
                    self._introduce(self._hellos)
            case Farewell(ranks=ranks):
                self._leaving.difference_update(ranks)
            case Sample(kinds=kinds, ranks=ranks):
                if "peers" in kinds:
                    until = time.monotonic() + message.lease_s
                    self._leases |= dict.fromkeys(ranks or self._hellos, (message.every, until))
                self._sampling.take(message)
            case Refused():
                self.refused = message.why
            case Command():
                leader = self._leader()
                if leader and (known := self._commands.receive(message, leader, self._board)):
                    self.send([known])
            case Preview():
                self.send([self._answer(message)])

    def _leader(self) -> Hello | None:
        return next((hello for hello in self._hellos.values() if hello.leader), None)

    def _answer(self, query: Preview) -> Previewed:
        why = "this run does not answer preview queries"
        try:
            if self.preview:
                return structs.replace(self.preview(query.changes), id=query.id)
        except Exception as error:  # noqa: BLE001 - an error of the hook must not end the run
            why = protocol.clip(sentence(error))
        leader = self._leader()
        return Previewed(query.id, query.changes, leader.revision if leader else 0, why)
