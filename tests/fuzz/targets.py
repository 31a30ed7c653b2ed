"""The fuzz targets. Each target processes inputs until it is closed.

An input is msgpack: a list of actions ``[what, who, bytes]`` (such as: connection `who` sends `bytes`), or only the
bytes if the target takes single frames or files. For any input, a target may raise only documented errors, and its
memory must stay bounded.
"""

import select
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol
from unittest import mock

import msgpack
import zmq

from agents import protocol
from agents.client import Client
from agents.hub import ingest
from agents.hub.recorder import Limits
from agents.hub.relay.node import Node
from agents.hub.server import Hub
from agents.protocol import Ack, Board, Unknown, WireError, codec
from agents.rank.hub_link import HubLink
from agents.rank.outbox import Outbox
from agents.rank.received_commands import ReceivedCommands
from agents.transport.addresses import Endpoints
from agents.transport.curve_keys import KeyStore, load_key
from agents.transport.reconnecting import ReconnectingSocket
from agents.transport.roles import Role
from agents.transport.server_sockets import ServerSocket
from cockpit.data import plain
from cockpit.data.diagnosis.diagnosis import diagnosis
from cockpit.data.diagnosis.status import status_fields, status_word
from cockpit.data.store import Store
from tests.fuzz import sockets
from tests.fuzz.clock import scripted
from tests.fuzz.files import FAST, Files
from tests.fuzz.values import EPOCH, RUN, WORLD
from tests.unit.agents.fleet import make_board, make_hello

PEERS = 6
STEPS = 12  # maximum number of steps in one input
LARGEST = 70_000  # maximum number of items in any container


class Target(Protocol):
    """A fuzz target. `fed` counts the frames or files processed; one input may contain several."""

    fed: int

    def feed(self, data: bytes) -> None: ...

    def close(self) -> None: ...


def steps_of(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Decode a fuzz input into its actions ``[what, who, bytes]``. An input that is not a list of actions is treated as
    one action with `data` as its bytes."""
    try:
        steps = msgpack.unpackb(data)
        for what, who, payload in steps[:STEPS]:
            if not (isinstance(what, int) and isinstance(who, int)):
                raise TypeError
            yield what, who % PEERS, payload if isinstance(payload, bytes) else b""
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        yield zlib.crc32(data), len(data) % PEERS, data


def bounded(root: object) -> None:
    """Check that no container in `root` exceeds its limit; the AssertionError names the container."""
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [(type(root).__name__, root)]
    while stack:
        name, one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict | list | set | tuple) or hasattr(one, "maxlen"):
            assert len(one) <= LARGEST, f"{name} holds {len(one)} items"  # type: ignore[arg-type]
            items = one.values() if isinstance(one, dict) else one
            if len(one) <= 1000:  # type: ignore[arg-type]
                stack += [(f"{name}[]", item) for item in items]  # type: ignore[union-attr]
        elif type(one).__module__.startswith("agents."):
            stack += [(f"{name}.{key}", value) for key, value in getattr(one, "__dict__", {}).items()]


def sent_well(frame: bytes) -> None:
    """Check that a frame sent by the code under test is valid: not too long, and without unknown messages."""
    assert len(frame) <= protocol.FRAME_BYTES, f"a frame of {len(frame)} bytes"
    assert not any(isinstance(one, Unknown) for one in codec.decode(frame))


# ------------------------------------------------------------------------------------------------ single frames


class Decode:
    """The fuzz target for `codec.decode`, which must return messages that can be encoded again, or raise an error with
    a one-sentence message. `codec.skim` must find the same messages."""

    def __init__(self) -> None:
        self.fed = 0

    def feed(self, data: bytes) -> None:
        self.fed += 1
        self._skim(data)
        try:
            messages = codec.decode(data)
        except WireError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, "not a sentence"
            return
        known = [one for one in messages if not isinstance(one, Unknown)]
        again = codec.encode(known)
        if len(again) <= protocol.MAX_FRAME_BYTES:
            assert codec.encode(codec.decode(again)) == again

    def _skim(self, data: bytes) -> None:
        skimmed = codec.skim(data)
        if not skimmed:
            return
        try:
            messages = codec.decode_each(data)
        except WireError:  # there are too many messages to decode one by one
            assert any(isinstance(one, Unknown) for one in map(codec.read, skimmed.kinds, skimmed.packed))
            return
        columns = zip(skimmed.kinds, skimmed.ranks, skimmed.packed, messages, strict=True)
        for kind, rank, packed, message in columns:
            if isinstance(message, Unknown):
                assert isinstance(codec.read(kind, packed), Unknown)
            else:
                assert codec.pack(codec.read(kind, packed)) == codec.pack(message)
                assert (type(message), message.rank) == (kind, rank)  # type: ignore[union-attr]

    def close(self) -> None: ...


# --------------------------------------------------------------------------------------------------------- hub

FROM_RANK, FROM_CLIENT, OVER_TCP, LATER, REFUSE, PARTS = range(6)


class HubTarget:
    """The fuzz target for the hub with all its parts: ingest, membership, control, subscribers, journal, sockets,
    authenticator."""

    def __init__(self) -> None:
        self.fed = 0
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=FAST))
        self._clock_context = scripted()
        self._clock = self._clock_context.__enter__()
        self._skims = mock.patch.object(ingest, "LARGE_WORLD", WORLD)  # use the fast path for large runs
        self._skims.start()
        keys = KeyStore(self._folder / "keys")
        self._keys = [
            load_key(keys.make(role.name.lower(), role)).public
            for role in (Role.RANK, Role.VIEWER, Role.OPERATOR)
        ]
        keys.make("revoked", Role.OPERATOR)
        self._keys += [keys.revoke("revoked").public, "", "nobody"]
        context = sockets.Context()
        for name in ("ranks", "clients"):
            (self._folder / name).touch()
        ipc = Endpoints(f"ipc://{self._folder}/ranks", f"ipc://{self._folder}/clients")
        with mock.patch.object(zmq, "Context", lambda: context):
            self.hub = Hub(
                RUN, self._folder, ipc, listen=["tcp://127.0.0.1:auto"], record=Limits(), keys=keys
            )
        self.hub._update_log.epoch = EPOCH
        self._routers = [one for one in context.sockets if one.kind == zmq.ROUTER]
        for rank in range(WORLD):
            self._say(FROM_RANK, rank, codec.encode([make_hello(rank, WORLD)]))
        board = make_board()
        self._say(FROM_RANK, 0, codec.encode([Board(0, 0, board.digest(), board.states())]))

    def _say(self, what: int, who: int, payload: bytes) -> None:
        match what:
            case 3:  # LATER
                self._clock.now_s += (0.02, 0.5, 1.1, 6.0, 61.0, 3600.0)[who]
                self.hub._round()
            case 4:  # REFUSE
                for router in self._routers:
                    router.refuses += [zmq.EAGAIN if who % 2 else zmq.EHOSTUNREACH] * (who + 1)
            case 5:  # PARTS
                key = {"User-Id": self._keys[who % len(self._keys)]}
                self._routers[who % len(self._routers)].put(b"%d" % who, payload, b"", **key)
                self.fed += 1
            case _:
                router = self._routers[what % 3 % len(self._routers)]
                router.put(b"%d" % who, payload, **{"User-Id": self._keys[who % len(self._keys)]})
                self.fed += 1

    def feed(self, data: bytes) -> None:
        for what, who, payload in steps_of(data):
            self._say(what % 6, who, payload)
        self._round()
        if self.hub._control._being_written:  # else the timing of the write would affect the following steps
            select.select([self.hub._journal.wake_fd], [], [], 1.0)
        self._round()
        for router in self._routers:
            assert not router.came, "frames that the hub has not read"
            while router.sent:
                sent_well(router.sent.popleft()[-1])

    def _round(self) -> None:
        self._clock.now_s += 0.03
        self.hub._round()

    def close(self) -> None:
        bounded(self.hub)
        self.hub._finish()
        for router in self._routers:
            assert router.closed
        self._skims.stop()
        self._clock_context.__exit__(None, None, None)
        shutil.rmtree(self._folder)


# -------------------------------------------------------------------------------------- the hub's other peers


class ClientTarget:
    """The fuzz target for a client and the cockpit's store, connected to a hub that sends arbitrary data."""

    def __init__(self) -> None:
        self.fed = 0
        self._clock_context = scripted()
        self._clock = self._clock_context.__enter__()
        context = sockets.Context()
        with mock.patch.object(zmq, "Context", lambda: context):
            self._client = Client("ipc://hub")
        self._socket = context.sockets[0]
        self._store = Store(self._clock.monotonic)
        self._resets = 0
        self._client.propose({"micro_batches": 2}, id="a")

    def feed(self, data: bytes) -> None:
        for what, who, payload in steps_of(data):
            if what % 6 == LATER:
                self._clock.now_s += (0.02, 0.5, 1.1, 6.0, 61.0, 3600.0)[who]
            else:
                self._socket.put(payload)
                self.fed += 1
        while self._socket.came:
            updates = self._client.poll(0)
            if self._client.resets != self._resets:
                self._resets = self._client.resets
                self._store.rebuild(updates)
            else:
                self._store.apply(updates)
        self._store.set_message_age(self._client.age_s)
        self._store.refused = self._client.refused
        for said in (
            diagnosis(self._store).text,
            *(item.text for item in status_fields(self._store, operator=True)),
        ):
            assert said.isprintable(), "control characters on a terminal"
        status_word(self._store)
        plain.to_json(plain.snapshot(self._store, self._client.epoch, self._client.seq))
        while self._socket.sent:
            sent_well(self._socket.sent.popleft()[-1])

    def close(self) -> None:
        bounded(self._client)
        self._client.close()
        self._clock_context.__exit__(None, None, None)


class LinkTarget:
    """The fuzz target for a rank's connection to the hub, where the hub sends arbitrary data."""

    def __init__(self) -> None:
        self.fed = 0
        self._clock_context = scripted()
        self._clock = self._clock_context.__enter__()
        context = sockets.Context()
        self._outbox, self._orders, self._board = Outbox(), ReceivedCommands(), make_board()
        with mock.patch.object(zmq, "Context", lambda: context):
            self._link = HubLink("ipc://hub", lambda: (1, "x", self._clock.now_s), self._outbox, self._orders)
        self._socket = context.sockets[0]
        shown = Board(0, 0, self._board.digest(), self._board.states())
        self._link.introduction = (make_hello(0, WORLD), shown)

    def feed(self, data: bytes) -> None:
        for what, who, payload in steps_of(data):
            if what % 6 == LATER:
                self._clock.now_s += (0.02, 0.5, 1.1, 6.0, 61.0, 3600.0)[who]
            elif what % 6 == REFUSE:
                self._socket.refuses += [zmq.EAGAIN] * (who + 1)
            else:
                self._socket.put(payload)
                self.fed += 1
        while self._socket.came:
            self._link.turn()
        command = self._orders.oldest
        if command:
            try:
                self._board.prepare(command.changes)
                said = Ack(0, command.revision, "applied", 1, "d")
            except ValueError as error:
                said = Ack(0, command.revision, "rejected", 1, "d", protocol.clip(str(error)))
            self._orders.settle(said)
            self._outbox.put(said)
        self._link.turn()
        while self._socket.sent:
            sent_well(self._socket.sent.popleft()[-1])

    def close(self) -> None:
        bounded(self._link)
        self._link.leave(0.0)
        self._clock_context.__exit__(None, None, None)


class RelayTarget:
    """The fuzz target for a relay between ranks and a hub; both the ranks and the hub send arbitrary data."""

    def __init__(self) -> None:
        self.fed = 0
        self._clock_context = scripted()
        self._clock = self._clock_context.__enter__()
        context = sockets.Context()
        with mock.patch.object(zmq, "Context", lambda: context):
            line = ReconnectingSocket(
                "ipc://hub", None, immediate=False, high_water=64, reconnect_max_ms=1000
            )
            server_socket = ServerSocket(zmq.Context(), b"r", Role.RANK)
        self._node = Node(RUN, line, server_socket)
        self._sides = {kind: one for one in context.sockets for kind in (one.kind,)}

    def feed(self, data: bytes) -> None:
        ranks, hub = self._sides[zmq.ROUTER], self._sides[zmq.DEALER]
        for what, who, payload in steps_of(data):
            match what % 6:
                case 3:  # LATER
                    self._clock.now_s += (0.02, 0.5, 1.1, 6.0, 61.0, 3600.0)[who]
                    self._node.turn(self._clock.now_s)
                case 4:  # REFUSE
                    hub.refuses += [zmq.EAGAIN] * (who + 1)
                    ranks.refuses += [zmq.EHOSTUNREACH] * (who + 1)
                case 1 | 2:
                    hub.put(payload)
                    self.fed += 1
                case _:
                    ranks.put(b"%d" % who, payload)
                    self.fed += 1
        for _ in range(2):
            self._clock.now_s += 0.03
            self._node.turn(self._clock.now_s)
        for side in (ranks, hub):
            assert not side.came, "frames that the relay has not read"
            while side.sent:
                frame = side.sent.popleft()[-1]
                assert len(frame) <= protocol.MAX_FRAME_BYTES
                codec.decode(frame)  # messages of unknown, newer kinds may be forwarded

    def close(self) -> None:
        bounded(self._node)
        self._clock_context.__exit__(None, None, None)


TARGETS: Final[dict[str, Callable[[], Target]]] = {
    "decode": Decode,
    "hub": HubTarget,
    "client": ClientTarget,
    "link": LinkTarget,
    "relay": RelayTarget,
    "files": Files,
}
# share of each target in `--runs`
SHARE: Final = {
    "decode": 0.4,
    "hub": 0.4,
    "client": 0.1,
    "link": 0.04,
    "relay": 0.04,
    "files": 0.02,
}
FRAMES: Final = ("decode",)  # an input is one frame
BYTES: Final = ("files",)  # an input is a file
