"""The socket of agents and clients, which reconnects to the hub automatically and reports why the hub refuses a
connection.

If a hub refuses a key over TCP, the hub ends the handshake without a message. Only the socket's monitor reports the
refusal. After several refusals libzmq stops trying to reconnect. This class therefore reconnects by itself: the key may
have been added to the hub's list in the meantime.
"""

import errno
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from agents import protocol
from agents.protocol.base import RunError
from agents.transport.addresses import is_tcp
from agents.transport.curve_keys import Key
from agents.transport.limits import check_room

RECONNECT_S = 2.0
# Number of consecutive failures before a report; a single failure may be due to a hub that is being killed.
FAILURES = 2
HEARTBEAT_MS = 2000  # only over TCP, so that a new connection replaces a dead one after a network failure
DEAD_AFTER_MS = 8000
MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ReconnectingSocket:
    """A DEALER socket to `endpoint`, encrypted if `key` is given. Raises RunError if `endpoint` is a TCP endpoint and
    `key` is None, and NoRoomError if this process is close to its limits.

    `immediate`: queue no messages while the socket is not connected to the hub (ZMQ_IMMEDIATE). `high_water`: maximum
    number of queued messages.
    """

    def __init__(
        self, endpoint: str, key: Key | None, *, immediate: bool, high_water: int, reconnect_max_ms: int
    ) -> None:
        self.endpoint = endpoint
        # Why the hub refuses the connection; None if it accepts the connection.
        self.refusal: str | None = None
        self._key = key
        self._failures = 0  # consecutive failures
        self._failed_s: float | None = None
        self._in_handshake = False  # whether the socket is connected but the handshake is not finished
        self._monitor: zmq.Socket[bytes] | None = None
        check_room()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.IMMEDIATE, int(immediate))
        self.socket.set(zmq.SNDHWM, high_water)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.MAXMSGSIZE, protocol.MAX_FRAME_BYTES)
        self.socket.set(zmq.RECONNECT_IVL, 100)  # libzmq adds a random delay of up to the same length
        self.socket.set(zmq.RECONNECT_IVL_MAX, reconnect_max_ms)
        if is_tcp(endpoint) or key is not None:  # with a key over ipc: a TCP endpoint that ssh forwards
            self._guard()
        # No routing id is set: the hub assigns an id to this connection, so no peer can use the id of another.
        self.socket.connect(endpoint)

    def _guard(self) -> None:
        if self._key is None:
            self.close(0)
            raise RunError(f"{self.endpoint} needs a key; name its file with --key or COCKPIT_KEY")
        self.socket.set(zmq.CURVE_SERVERKEY, self._key.hub.encode())
        self.socket.set(zmq.CURVE_PUBLICKEY, self._key.public.encode())
        self.socket.set(zmq.CURVE_SECRETKEY, self._key.secret.encode())
        self.socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, DEAD_AFTER_MS)
        self.socket.set(zmq.IPV6, int("[" in self.endpoint))
        self._monitor = self.socket.get_monitor_socket(MONITORED)

    def check_handshakes(self) -> None:
        """Process the handshake results that the socket monitor has reported since the last call, and reconnect
        `RECONNECT_S` seconds after a failed handshake."""
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_CONNECTED:
                self._in_handshake = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._in_handshake = False
                self._failures, self._failed_s, self.refusal = 0, None, None
            elif event != zmq.EVENT_DISCONNECTED:
                self._in_handshake = False
                self._failed(event)
            elif self._in_handshake:  # the connection was closed without an error, as by a web server
                self._in_handshake = False
                self._failed(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        now = time.monotonic()
        if self._failed_s is not None and now - self._failed_s >= RECONNECT_S:
            self._failed_s = None
            self._reconnect()

    def _failed(self, event: int) -> None:
        self._failures += 1
        if self._failed_s is None:
            self._failed_s = time.monotonic()
        assert self._key is not None
        own = f"the key {self._key.name}"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = (
                f"the hub at {self.endpoint} refuses {own}: it is revoked or not listed there; "
                "ask the owner of the run for another key"
            )
        elif self._failures >= FAILURES:
            self.refusal = (
                f"{self.endpoint} is not the hub for {own}, or is not a hub; check the address, and use a key "
                "made in the hub's key folder"
            )

    def _reconnect(self) -> None:
        try:
            self.socket.disconnect(self.endpoint)
        except zmq.ZMQError as error:  # libzmq has already removed this connection
            if error.errno != errno.ENOENT:
                raise
        self.socket.connect(self.endpoint)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket after sending queued messages for at most `linger_ms`. A second call does nothing."""
        if self.socket.closed:
            return
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(0)
        self.socket.set(zmq.LINGER, linger_ms)
        self.socket.close()
        self._context.term()
