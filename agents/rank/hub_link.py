"""The agent's connection to the hub; only the agent's thread uses it."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq
from msgspec import structs

from agents import protocol
from agents.protocol import (
    PREVIEWS,
    STACKS,
    AnyMessage,
    Board,
    Changes,
    Command,
    Event,
    Farewell,
    Gone,
    Hello,
    Preview,
    Previewed,
    Pulse,
    Refused,
    Sample,
    StackQuery,
    Welcome,
    WireError,
    codec,
)
from agents.rank.errors import named, sentence
from agents.rank.outbox import Outbox
from agents.rank.received_commands import ReceivedCommands
from agents.rank.sampling import Sampling
from agents.rank.sensors.vitals import Reader, Sensors
from agents.rank.stacks import Stacks
from agents.transport.curve_keys import Key
from agents.transport.reach import Fallback, Reach
from agents.transport.reconnecting import ReconnectingSocket

# This time is long, because each wake-up competes with the trainer for the GIL. A message wakes the thread immediately.
POLL_MS = 200
PULSE_S = 1.0
FRAMES_A_TURN = 16
# Minimum interval between introductions, because a hub requests one for each frame of an unknown rank.
WELCOME_PAUSE_S = 0.2
REFUSED_PAUSE_S = 2.0  # interval at which a refused rank introduces itself again

REASONS_LOGGED = 8
# How long a rank that leaves waits for a hub that has taken nothing yet, and for any other hub.
FIRST_S, LAST_S = 15.0, 2.0

NONE = Sensors()

log = logging.getLogger("agents")

Doing = Callable[[], tuple[int, str, float]]
Previewer = Callable[[Changes], Previewed]
"""Estimates the effect of changes; raises ValueError with a sentence if they are not legal."""


class HubLink:
    """Sends the messages in the outbox and, each second, a heartbeat (`Pulse`) and measurements of the device and the
    machine (`Vitals`); receives messages from the hub."""

    def __init__(
        self,
        endpoint: str,
        doing: Doing,
        outbox: Outbox,
        orders: ReceivedCommands,
        sensors: Sensors = NONE,
        key: Key | None = None,
        training: int = 0,
        fallback: Fallback | None = None,
    ) -> None:
        """`training`: the identifier of the training thread. `fallback`: the hub, if `endpoint` is a relay."""
        self.introduction: tuple[Hello, Board | None] | None = None
        # This lock is held while an introduction is queued, so that an older board is never queued after a newer one.
        self.introducing = threading.Lock()
        self._refused: str | None = None
        self.preview: Previewer | None = None
        self.stacks = Stacks(training)
        self._doing = doing
        self._outbox = outbox
        self._orders = orders
        self.sampling = Sampling()
        self._sensors = sensors
        self._reader: Reader | None = None
        self._unsent: bytes | None = None
        self._introduced_s = 0.0
        self._refused_s = 0.0
        self._pulsed_s = 0.0
        self._cpu_s = time.process_time()
        self._fallback = fallback
        self._checked_s = 0.0
        self._logged: set[str] = set()  # reasons for refusals
        self._connected = False  # whether a message was sent to the hub
        self._gone = self._parted = False  # whether Gone was sent; whether the hub has confirmed it
        self._connect(Reach(endpoint, key))

    def _connect(self, to: Reach) -> None:
        # With `immediate`, libzmq queues nothing while the hub is absent: a queue of libzmq would keep the oldest
        # messages, but the outbox keeps the newest.
        self._line = ReconnectingSocket(
            to.endpoint, to.key, immediate=True, high_water=FRAMES_A_TURN, reconnect_max_ms=2000
        )
        self._dealer = self._line.socket

    @property
    def capabilities(self) -> list[str]:
        """The kinds of queries from the hub that this rank can answer: `STACKS`, `PREVIEWS`, both or neither."""
        return [*([STACKS] if self._sensors.process else []), *([PREVIEWS] if self.preview else [])]

    @property
    def refused(self) -> str | None:
        """Why the hub refuses this rank; None if it does not."""
        return self._line.refusal or self._refused

    def turn(self) -> None:
        """Receive messages from the hub, waiting at most `POLL_MS`; then queue a pulse if one is due, and send the
        queued messages."""
        self._dealer.poll(POLL_MS)
        self._line.check_handshakes()
        if self._line.refusal:
            self._log_refusal(self._line.refusal)
        self._receive()
        now = time.monotonic()
        self._check_relay(now)
        if self.introduction is None or self._is_refused(now):
            return
        if now - self._pulsed_s >= PULSE_S:
            self._measure(self.introduction[0].rank, now)
        self._flush()

    def leave(self, linger_s: float | None, restarting: bool = False) -> None:
        """Send the queued messages and Gone, wait until the hub confirms that it has taken them, and close the socket.
        Waits at most `linger_s` seconds; by default `FIRST_S` if the hub has taken nothing yet, because it may still be
        starting, else `LAST_S`. Logs what is lost.
        """
        if linger_s is None:
            linger_s = LAST_S if self._connected else FIRST_S
        deadline = time.monotonic() + linger_s
        while self.introduction and self.refused is None and not self._parted:
            if self._flush() and not self._gone:
                rank = self.introduction[0].rank
                gone = Gone(rank, clean=True, process="restarting" if restarting else "unknown")
                self._gone = self._send(codec.encode([gone]))
            left_ms = 1000 * (deadline - time.monotonic())
            if left_ms <= 0:
                self._log_lost(linger_s)
                break
            self._dealer.poll(
                min(POLL_MS, max(1, int(left_ms))), zmq.POLLIN | (0 if self._gone else zmq.POLLOUT)
            )
            self._line.check_handshakes()
            self._receive()
            self._check_relay(time.monotonic())
        if self.refused:
            self._log_refusal(self.refused)
        self._line.close(max(0, int(1000 * (deadline - time.monotonic()))))

    def _log_lost(self, waited_s: float) -> None:
        assert self.introduction is not None
        lost = self._outbox.waiting + len(codec.decode_each(self._unsent) if self._unsent else ())
        who = f"the last {lost} records of rank {self.introduction[0].rank} did not reach"
        if not lost:
            who = f"rank {self.introduction[0].rank} has left, but its last records may not have reached"
        with suppress(Exception):  # errors of the program's logging handlers
            log.warning("%s the hub within %.1f s, so the run may not show them", who, waited_s)

    def _check_relay(self, now: float) -> None:
        """Connect to the hub directly if the relay has not started in time, or has failed for good."""
        if self._fallback is None or now - self._checked_s < PULSE_S:
            return
        self._checked_s = now
        if not self._fallback.is_due(now):
            return
        relay, fallback = self._line, self._fallback
        self._connect(fallback.hub)
        self._fallback = None
        self._gone = False
        relay.close()
        self._refused, self._introduced_s = None, 0.0
        self._introduce(now)
        if fallback.reports:
            text = "the relay of this node does not run; the ranks of the node connect to the hub directly"
            self._outbox.put(Event(time.time(), "warning", "agent", text))

    def _is_refused(self, now: float) -> bool:
        if self._refused is not None and now - self._refused_s >= REFUSED_PAUSE_S:
            self._refused = None
            self._introduce(now)
        return self._refused is not None

    def _introduce(self, now: float) -> None:
        if self.introduction is None or now - self._introduced_s < WELCOME_PAUSE_S:
            return
        self._introduced_s = now
        step = self._current()[0]
        with self.introducing:
            hello, board = self.introduction
            self._outbox.put(structs.replace(hello, step=max(hello.step, step)))
            for message in (*([board] if board else []), *self._orders.latest_acks()):
                self._outbox.put(message)

    def _measure(self, rank: int, now: float) -> None:
        pulse = self._pulse(rank, now)
        self._outbox.put(pulse)
        self._flush()  # the pulse is sent before the device is read, because reading may be slow
        if self._reader is None:
            self._reader = self._sensors.open()
        vitals = self._reader.read(rank, pulse.step)
        if vitals:
            self._outbox.put(vitals)

    def _pulse(self, rank: int, now: float) -> Pulse:
        cpu_s = time.process_time()
        known = self._sensors.process and self._pulsed_s
        busy = 100 * (cpu_s - self._cpu_s) / (now - self._pulsed_s) if known else None
        self._cpu_s, self._pulsed_s = cpu_s, now
        return structs.replace(self._position(rank, now), cpu_percent=busy)

    def _position(self, rank: int, now: float) -> Pulse:
        """The current step and operation."""
        step, operation, since = self._current()
        return Pulse(rank, step, protocol.clip(operation), max(0.0, 1000 * (now - since)))

    def _current(self) -> tuple[int, str, float]:
        try:
            return self._doing()
        except Exception as error:  # noqa: BLE001 - an error of the trainer's hook must not stop the pulse
            return 0, f"unknown: {named(error)}", time.monotonic()

    def _flush(self) -> bool:
        """Send until the outbox is empty or the socket's queue is full; return True if the outbox is empty."""
        for _ in range(FRAMES_A_TURN):
            frame = self._unsent or self._outbox.frame()
            if frame is None:
                return True
            if not self._send(frame):
                self._unsent = frame
                return False
            self._unsent = None
        return False

    def _send(self, frame: bytes) -> bool:
        try:
            self._dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._connected = True
        return True

    def _receive(self) -> None:
        for _ in range(FRAMES_A_TURN):
            try:
                messages = codec.decode(self._dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except WireError as error:
                messages = [Refused(protocol.clip(str(error)))]
            for message in messages:
                self._take(message)

    def _take(self, message: AnyMessage) -> None:
        match message:
            case Welcome():
                self._introduce(time.monotonic())
                self._gone = False  # a hub that does not know this rank has not taken its Gone
            case Farewell():
                self._parted = self._gone
            case Sample():
                self.sampling.take(message)
            case Refused():
                self._take_refusal(message.why, time.monotonic())
            case Command() if self.introduction and self.introduction[0].leader:
                known = self._orders.receive(message, *self.introduction)
                if known:
                    self._outbox.put(known)
            case Preview() if self.introduction:
                self._outbox.put(self._answer(message, self.introduction[0]))
            case StackQuery() if self.introduction and self._sensors.process:
                pulse = self._position(self.introduction[0].rank, time.monotonic())
                stacks = self.stacks.answer(message, pulse)
                if stacks:
                    self._outbox.put(stacks)

    def _take_refusal(self, why: str, now: float) -> None:
        """Note the refusal. A refusal that is repeated after a pause is logged: the first one may be due to a former
        process of this rank, which the hub has not lost yet."""
        again = self._refused_s and REFUSED_PAUSE_S / 2 <= now - self._refused_s <= 3 * REFUSED_PAUSE_S
        if again and self._refused is None:
            self._log_refusal(why)
        if self._refused is None:
            self._refused_s = now
        self._refused = why

    def _log_refusal(self, why: str) -> None:
        """Log the reason, each reason once, because only this process can tell its user that it is not shown."""
        if why not in self._logged and len(self._logged) < REASONS_LOGGED:
            self._logged.add(why)
            with suppress(Exception):  # errors of the program's logging handlers
                log.warning("the hub refuses this rank, so the run does not show it: %s", protocol.clean(why))

    def _answer(self, query: Preview, hello: Hello) -> Previewed:
        why = "this rank does not answer preview queries"
        try:
            if self.preview:
                return structs.replace(self.preview(query.changes), id=query.id)
        except Exception as error:  # noqa: BLE001 - an error of the trainer's hook must not stop the pulse
            why = protocol.clip(sentence(error))
        return Previewed(query.id, query.changes, hello.revision, why)
