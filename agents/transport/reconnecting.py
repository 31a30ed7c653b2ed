"""A socket to a hub, for agents and clients alike: it tries again by itself, and can say why it is not let in.

Over TCP a hub that does not take our key ends the handshake without a message; only the socket's monitor hears
of it. After some refusals libzmq gives up, so we dial again: the key may be listed meanwhile.
"""

import errno
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from agents import protocol
from agents.protocol.base import RunError
from agents.transport.addresses import is_tcp
from agents.transport.keys import Key

REDIAL_S = 2.0
FAILURES = 2  # in a row, before one that may be a hub that is just being killed is told
HEARTBEAT_MS = 2000  # over TCP, so that a network that has come back finds a new connection, not an old wait
DEAD_AFTER_MS = 8000
HEARD = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ReconnectingSocket:
    """A DEALER to `endpoint`, under `key` if that is TCP. RunError: TCP without a key.

    `immediate`: nothing is queued for a hub that is not there. `high_water`: messages queued at most.
    """

    def __init__(
        self, endpoint: str, key: Key | None, *, immediate: bool, high_water: int, reconnect_max_ms: int
    ) -> None:
        self.endpoint = endpoint
        self.refusal: str | None = None  # why the hub does not let us in; None again once it does
        self._key = key
        self._failures = 0  # in a row
        self._failed_s: float | None = None
        self._shaking = False  # connected, and the handshake is not over
        self._monitor: zmq.Socket[bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.IMMEDIATE, int(immediate))
        self.socket.set(zmq.SNDHWM, high_water)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.MAXMSGSIZE, protocol.MAX_FRAME_BYTES)
        self.socket.set(zmq.RECONNECT_IVL, 100)  # libzmq adds jitter of up to as much
        self.socket.set(zmq.RECONNECT_IVL_MAX, reconnect_max_ms)
        if is_tcp(endpoint):
            self._guard()
        # No routing id: the hub then knows this connection by one of its own, which nobody can claim.
        self.socket.connect(endpoint)

    def _guard(self) -> None:
        if self._key is None:
            self.close(0)
            raise RunError(
                f"{self.endpoint} is reached with a key only; name its file with --key or COCKPIT_KEY"
            )
        self.socket.set(zmq.CURVE_SERVERKEY, self._key.hub.encode())
        self.socket.set(zmq.CURVE_PUBLICKEY, self._key.public.encode())
        self.socket.set(zmq.CURVE_SECRETKEY, self._key.secret.encode())
        self.socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, DEAD_AFTER_MS)
        self.socket.set(zmq.IPV6, int("[" in self.endpoint))
        self._monitor = self.socket.get_monitor_socket(HEARD)

    def look(self) -> None:
        """Take note of how handshakes went, and dial again if need be."""
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_CONNECTED:
                self._shaking = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._shaking = False
                self._failures, self._failed_s, self.refusal = 0, None, None
            elif event != zmq.EVENT_DISCONNECTED:
                self._shaking = False
                self._failed(event)
            elif self._shaking:  # closed without a word, as a web server does
                self._shaking = False
                self._failed(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        now = time.monotonic()
        if self._failed_s is not None and now - self._failed_s >= REDIAL_S:
            self._failed_s = None
            self._dial_again()

    def _failed(self, event: int) -> None:
        self._failures += 1
        if self._failed_s is None:
            self._failed_s = time.monotonic()
        assert self._key is not None
        mine = f"the key {self._key.name}"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = (
                f"the hub at {self.endpoint} does not take {mine}: it is revoked or on no list there; "
                "ask the owner of the run for another"
            )
        elif self._failures >= FAILURES:
            self.refusal = (
                f"what listens at {self.endpoint} is not the hub that {mine} is for, or no hub at all; look at the "
                "address, and use a key made in the hub's key folder"
            )

    def _dial_again(self) -> None:
        try:
            self.socket.disconnect(self.endpoint)
        except zmq.ZMQError as error:  # libzmq has given it up by itself
            if error.errno != errno.ENOENT:
                raise
        self.socket.connect(self.endpoint)

    def close(self, linger_ms: int = 0) -> None:
        """Leave; what is queued has `linger_ms` to go out. A second call does nothing."""
        if self.socket.closed:
            return
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(0)
        self.socket.set(zmq.LINGER, linger_ms)
        self.socket.close()
        self._context.term()
