"""The hub's sockets. Whoever speaks has a role: by the socket over ipc, and over TCP by a verified key.

Over ipc the private directory decides who may come in. Over TCP every message names the key it came under, and
the key's role is looked up anew for each message and each frame sent: a connection outlives its key.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq
from msgspec import structs

from agents import protocol
from agents.protocol import AnyMessage, Credit, Decide, Message, Preview, Propose, Sample, Try, Unknown, clip
from agents.protocol.base import RunError
from agents.transport.addresses import Endpoints, endpoint, listen_address
from agents.transport.admission import RESERVE_IPC, RESERVE_TCP, Admission
from agents.transport.authenticator import DOMAIN, ZapAuthenticator
from agents.transport.keys import KeyStore, Role

LEAVE_S = 0.5  # for the last frames to go out
HANDSHAKE_MS = 5000  # for a peer that connects to say who it is
HEARTBEAT_MS = 5000  # over TCP, so that a machine that has vanished is noticed
DEAD_AFTER_MS = 20_000
KEY_BYTES = 40  # of a public key in Z85
CHANGES = (Propose, Try, Decide)  # each with `who` asks for it
ASKS = (Propose, Try, Preview)  # each with an `id`, by which the answer is known
OF_TRIALS = re.compile(r"\.(try|revert\d+)$")  # as `trials` calls its own proposals
MAY: dict[Role, tuple[type[Message], ...]] = {
    Role.VIEWER: (Credit, Preview, Sample),
    Role.OPERATOR: (Credit, Preview, Sample, *CHANGES),
}
"""What a client may send; a rank may send what is not a client's, and `Intake` looks at that."""


class Received(NamedTuple):
    """Frames from one peer."""

    peer: bytes  # the hub's name of this connection, and of the key it came under
    role: Role | None  # None: the key is not in force any more
    name: str  # of the key; "" over ipc
    frames: list[bytes]  # all but the first empty: a message of ours has one, and no other is copied


class ServerSocket:
    """A socket in a private directory: who can enter the directory has the door's role."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], mark: bytes, role: Role) -> None:
        self.mark = mark  # the first byte of the names of its peers
        self._role = role
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, int(LEAVE_S * 1000))
        self.socket.set(zmq.MAXMSGSIZE, protocol.MAX_FRAME_BYTES)
        self.socket.set(zmq.SNDHWM, 64)  # the most credit a client can grant at once
        self.socket.set(zmq.RCVHWM, 64)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)  # say when a peer's queue is full or it has left
        self.socket.set(zmq.BACKLOG, 1024)

    def bind(self, url: str) -> str:
        """Listen; the URL with the port that was chosen. Over ipc a killed hub's socket is replaced."""
        try:
            self.socket.bind(url)
        except zmq.ZMQError as error:
            raise RunError(f"nothing can listen on {url}: {os.strerror(error.errno or 0)}") from None
        return self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def receive(self) -> Received:
        """The next frames; raises zmq.Again when there are none."""
        identity = self.socket.recv(zmq.NOBLOCK)
        frames = [self.socket.recv()]  # it has come with its sender's identity
        while self.socket.get(zmq.RCVMORE):
            self.socket.recv()
            frames.append(b"")
        return Received(self.mark + identity, self._role, "", frames)

    def role(self, _peer: bytes) -> Role | None:
        """What the peer may be now."""
        return self._role

    def send(self, peer: bytes, frame: bytes) -> bool:
        """False if the peer's queue is full, or it has left."""
        try:
            self.socket.send_multipart([self.identity(peer), frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True

    def identity(self, peer: bytes) -> bytes:
        """By which the socket knows the peer."""
        return peer[1:]


class CurveSocket(ServerSocket):
    """A TCP socket with CURVE and ZAP; a peer's name holds its verified key, which nobody else can claim."""

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
        self.socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no handler, no entry
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
    """All sockets of one hub: ranks and clients over ipc, and both over one TCP port if it is to `listen` there."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        ipc: Endpoints,
        listen: Sequence[str] = (),
        keys: KeyStore | None = None,
    ) -> None:
        ranks, clients = ServerSocket(context, b"r", Role.RANK), ServerSocket(context, b"c", Role.OPERATOR)
        self._private = ((ranks, ipc.ranks), (clients, ipc.clients))
        for server_socket, url in self._private:
            server_socket.bind(url)
        self._sockets: dict[bytes, ServerSocket] = {
            server_socket.mark: server_socket for server_socket in (ranks, clients)
        }
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
        """The sockets at which something may come."""
        return [*(server_socket.socket for server_socket in self), *(one.monitor for one in self._admissions)]

    def admit(self) -> None:
        """Look at who has come; called whenever one may have."""
        for one in self._admissions:
            one.look()

    def turned_away(self) -> int:
        """How many connections were closed since the last call, for want of file descriptors."""
        count = sum(one.turned_away for one in self._admissions)
        for one in self._admissions:
            one.turned_away = 0
        return count

    def bind_again(self) -> None:
        """Listen in the private directory, where somebody may have removed a socket since; the other is left alone."""
        for server_socket, url in self._private:
            if not Path(url.removeprefix("ipc://")).exists():
                server_socket.bind(url)

    def __iter__(self) -> Iterator[ServerSocket]:
        return iter(self._sockets.values())

    def _listen(self, context: zmq.Context[zmq.Socket[bytes]], places: Sequence[str], keys: KeyStore) -> None:
        """At the first of `places` where that can be."""
        own = keys.hub_key()
        self.authenticator = ZapAuthenticator(context, keys)
        server_socket = CurveSocket(context, b"t", self.authenticator, own.secret)
        self._sockets[server_socket.mark] = server_socket
        for place in places:
            host, port = listen_address(place)
            server_socket.socket.set(zmq.IPV6, int(host.startswith("[")))
            try:
                url = server_socket.bind(endpoint(host, port or "*"))
                self._check(server_socket, url, place)
                break
            except RunError:
                if place == places[-1]:
                    self.close()
                    raise
        self.tcp = Endpoints(ranks=url, clients=url, keys=str(keys.folder.absolute()), hub=own.public)

    @staticmethod
    def _check(server_socket: ServerSocket, url: str, place: str) -> None:
        """RunError if `place` is a name for every address of the machine; only the system knows what a name is."""
        try:
            listen_address(url)
        except RunError as error:
            server_socket.socket.unbind(url)
            raise RunError(f"{place} is the same as {error}") from None

    def role(self, peer: bytes) -> Role | None:
        """What a peer may be now; None: nothing any more."""
        return self._sockets[peer[:1]].role(peer)

    def send(self, peer: bytes, frame: bytes) -> bool:
        """False if the peer's queue is full, it has left, or its key is not in force any more."""
        server_socket = self._sockets[peer[:1]]
        return server_socket.role(peer) is not None and server_socket.send(peer, frame)

    def answer(self, peer: bytes, frame: bytes) -> bool:
        """As `send`, also to a peer whose key is not in force: to tell it so."""
        return self._sockets[peer[:1]].send(peer, frame)

    def close(self) -> None:
        for one in self._admissions:
            one.close()
        for server_socket in self:
            server_socket.socket.close()
        if self.authenticator:
            self.authenticator.close()


def refusal(came: Received, message: Message) -> str | None:
    """One sentence if the peer's key does not allow `message`; over ipc there is no key to speak of."""
    if came.role is None:
        return f"the key {came.name} is not in force any more; ask the owner of the run for another"
    kind = message.kind if isinstance(message, Unknown) else type(message).__name__.lower()
    mine = f"the key {came.name} has the role {came.role}"
    if came.role is Role.RANK:
        if came.name and isinstance(message, MAY[Role.OPERATOR]):
            return f"{mine} and reports; watching takes the role viewer, changes take the role operator"
        return None
    if not isinstance(message, MAY[Role.OPERATOR]):
        if came.name:
            return f"{mine}; only one with the role rank may send a {kind}"
        return f"a client sends credit and proposals, and this is a {kind}"
    if not isinstance(message, MAY[came.role]):
        return f"{mine} and only watches; changes take the role operator"
    if isinstance(message, Propose) and OF_TRIALS.search(message.id):
        return (
            f"proposals of a name like {message.id} are the hub's own, of its trials; ask under another name"
        )
    return None


def signed(came: Received, message: AnyMessage) -> AnyMessage:
    """The message with the name of its key in front of what the client says of itself, which is a claim."""
    if came.name and isinstance(message, CHANGES):
        return structs.replace(message, who=clip(f"{came.name}: {message.who}"))
    return message
