"""The hub's sockets. Each peer has a role: rank, operator or viewer. Over ipc the role depends on the socket; over TCP
it depends on the peer's verified key.

Over ipc the permissions of the private directory decide who can connect, and a peer chooses its role by the socket to
which it connects: a program that should only watch connects to the viewers' socket. Over TCP the sender's key is known
for every message. The role of the key is looked up for each received message and each sent frame, because a key may be
revoked at any time.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq

from agents import protocol
from agents.protocol.base import RunError
from agents.transport.addresses import Endpoints, endpoint, listen_address
from agents.transport.admission import RESERVE_IPC, RESERVE_TCP, Admission
from agents.transport.authenticator import DOMAIN, ZapAuthenticator
from agents.transport.curve_keys import KeyStore
from agents.transport.roles import Role

LEAVE_S = 0.5  # maximum time to send the last frames when a socket is closed
HANDSHAKE_MS = 5000  # maximum duration of a peer's handshake
HEARTBEAT_MS = 5000  # only over TCP, to detect machines that no longer respond
DEAD_AFTER_MS = 20_000
KEY_BYTES = 40  # length of a public key in Z85


class Received(NamedTuple):
    """One received message, with its sender."""

    peer: bytes  # the id that the hub assigned to this connection, including its key
    role: Role | None  # None if the key is revoked or no longer listed
    name: str  # name of the key; "" over ipc
    frames: list[bytes]  # legal messages have one part; the content of further parts is not copied


class ServerSocket:
    """A server socket over ipc, in a private directory. Any process that can enter the directory can connect, and gets
    the role of this socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], mark: bytes, role: Role) -> None:
        self.mark = mark  # first byte of the ids of this socket's peers
        self._role = role
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, int(LEAVE_S * 1000))
        self.socket.set(zmq.MAXMSGSIZE, protocol.MAX_FRAME_BYTES)
        self.socket.set(zmq.SNDHWM, 64)  # maximum credit that a client can grant at once
        self.socket.set(zmq.RCVHWM, 64)
        # `send` raises an error if the peer's queue is full or the peer has left.
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.set(zmq.BACKLOG, 1024)

    def bind(self, url: str) -> str:
        """Listen on `url`; returns the URL with the chosen port. Over ipc, replaces the socket file of a killed hub."""
        try:
            self.socket.bind(url)
        except zmq.ZMQError as error:
            raise RunError(f"cannot listen on {url}: {os.strerror(error.errno or 0)}") from None
        return self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def receive(self) -> Received:
        """The next received message; raises zmq.Again if there is none."""
        identity = self.socket.recv(zmq.NOBLOCK)
        frames = [self.socket.recv()]  # does not wait, because all parts of a message arrive together
        while self.socket.get(zmq.RCVMORE):
            self.socket.recv()
            frames.append(b"")
        return Received(self.mark + identity, self._role, "", frames)

    def role(self, _peer: bytes) -> Role | None:
        """The peer's current role; None if its key is revoked or no longer listed."""
        return self._role

    def send(self, peer: bytes, frame: bytes) -> bool:
        """Send a frame; return False if the peer's queue is full or the peer has left."""
        try:
            self.socket.send_multipart([self.identity(peer), frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True

    def identity(self, peer: bytes) -> bytes:
        """The peer's routing id on the socket."""
        return peer[1:]


class CurveSocket(ServerSocket):
    """A TCP socket with CURVE and ZAP. A peer's id contains its verified key, so no other peer can use that id."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        mark: bytes,
        authenticator: ZapAuthenticator,
        secret: str,
    ) -> None:
        super().__init__(context, mark, Role.VIEWER)
        self._authenticator = authenticator
        self.socket.set(zmq.CURVE_SERVER, 1)
        self.socket.set(zmq.CURVE_SECRETKEY, secret.encode())
        self.socket.set(zmq.ZAP_DOMAIN, DOMAIN)
        self.socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # if the ZAP handler is missing, no peer is accepted
        self.socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, DEAD_AFTER_MS)

    def receive(self) -> Received:
        identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        key = str(frames[0].get("User-Id")).encode() if frames else b""
        row = self._authenticator.known(key)
        role = row.role if row and row.revoked_s is None else None
        name = row.name if row else "of this connection"
        whole = [one.bytes for one in frames[:1]] + [b""] * (len(frames) - 1)
        return Received(self.mark + key.ljust(KEY_BYTES) + identity.bytes, role, name, whole)

    def role(self, peer: bytes) -> Role | None:
        row = self._authenticator.grant(peer[1 : 1 + KEY_BYTES])
        return row.role if row else None

    def identity(self, peer: bytes) -> bytes:
        return peer[1 + KEY_BYTES :]


class ServerSockets:
    """All sockets of one hub: three ipc sockets (for ranks, operators and viewers) and, if `listen` is given, one TCP
    socket for all three roles.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        ipc: Endpoints,
        listen: Sequence[str] = (),
        keys: KeyStore | None = None,
    ) -> None:
        rows = (
            (b"r", Role.RANK, ipc.ranks),
            (b"c", Role.OPERATOR, ipc.clients),
            (b"v", Role.VIEWER, ipc.viewers),
        )
        self._private = [(ServerSocket(context, mark, role), url) for mark, role, url in rows if url]
        for server_socket, url in self._private:
            server_socket.bind(url)
        self._sockets: dict[bytes, ServerSocket] = {one.mark: one for one, _ in self._private}
        self._admissions: list[Admission] = []
        self.authenticator: ZapAuthenticator | None = None
        self.tcp: Endpoints | None = None
        if listen:
            assert keys is not None, "TCP without keys is not offered"
            self._listen(context, listen, keys)
        self._admissions = [
            Admission(
                server_socket.socket, RESERVE_TCP if isinstance(server_socket, CurveSocket) else RESERVE_IPC
            )
            for server_socket in self
        ]

    @property
    def waited_for(self) -> list[zmq.Socket[bytes]]:
        """The sockets to poll."""
        return [*(server_socket.socket for server_socket in self), *(one.monitor for one in self._admissions)]

    def admit(self) -> None:
        """Close new connections that take a file descriptor from the hub's reserve. Must be called after each poll."""
        for one in self._admissions:
            one.close_excess()

    def turned_away(self) -> int:
        """How many connections were closed for lack of free file descriptors since `turned_away` was last called."""
        count = sum(one.turned_away for one in self._admissions)
        for one in self._admissions:
            one.turned_away = 0
        return count

    def bind_again(self) -> None:
        """Rebind every ipc socket whose file has been removed."""
        for server_socket, url in self._private:
            if not Path(url.removeprefix("ipc://")).exists():
                server_socket.bind(url)

    def __iter__(self) -> Iterator[ServerSocket]:
        return iter(self._sockets.values())

    def _listen(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Sequence[str], keys: KeyStore
    ) -> None:
        """Listen on the first of `addresses` that is available."""
        own = keys.hub_key()
        self.authenticator = ZapAuthenticator(context, keys)
        server_socket = CurveSocket(context, b"t", self.authenticator, own.secret)
        self._sockets[server_socket.mark] = server_socket
        for address in addresses:
            host, port = listen_address(address)
            server_socket.socket.set(zmq.IPV6, int(host.startswith("[")))
            try:
                url = server_socket.bind(endpoint(host, port or "*"))
                self._check(server_socket, url, address)
                break
            except RunError:
                if address == addresses[-1]:
                    self.close()
                    raise
        self.tcp = Endpoints(ranks=url, clients=url, keys=str(keys.folder.absolute()), hub=own.public)

    @staticmethod
    def _check(server_socket: ServerSocket, url: str, address: str) -> None:
        """Raise RunError if the host name `address` was resolved to the wildcard address (all interfaces)."""
        try:
            listen_address(url)
        except RunError as error:
            server_socket.socket.unbind(url)
            raise RunError(f"{address} is the same as {error}") from None

    def role(self, peer: bytes) -> Role | None:
        """A peer's current role; None if its key is revoked or no longer listed."""
        return self._sockets[peer[:1]].role(peer)

    def send(self, peer: bytes, frame: bytes) -> bool:
        """Send a frame; return False if the peer's queue is full, if the peer has left, or if the peer's key is revoked
        or no longer listed."""
        server_socket = self._sockets[peer[:1]]
        return server_socket.role(peer) is not None and server_socket.send(peer, frame)

    def answer(self, peer: bytes, frame: bytes) -> bool:
        """Like `send`, but also sends to a peer whose key is revoked or no longer listed, so that the peer receives the
        refusal.
        """
        return self._sockets[peer[:1]].send(peer, frame)

    def close(self) -> None:
        for one in self._admissions:
            one.close()
        for server_socket in self:
            server_socket.socket.close()
        if self.authenticator:
            self.authenticator.close()
