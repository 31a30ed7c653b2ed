"""A relay: the ranks of one node speak to it over ipc, and it speaks to the hub for all of them.

    python -m agents.hub.relay --run NAME --hub URL [--sockets DIR] [--key FILE] [--parent PID]

Ranks -> ipc -> relay -> ipc or TCP -> hub, the same protocol on both sides: to its ranks it is a hub, to the hub one
connection that may speak for the ranks that said hello through it. It keeps nothing that matters: killed at any time,
it asks the ranks for their hello when it is back, and so does a hub that was.
"""

import argparse
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterable
from collections.abc import Sequence as Words
from dataclasses import dataclass
from pathlib import Path

import zmq

from agents import protocol
from agents.hub.relay_queue import RelayQueue
from agents.hub.telemetry.allowed_records import OF_ITSELF, OF_THE_JOB
from agents.hub.telemetry.membership import SUCCESSION_S
from agents.protocol import (
    AnyMessage,
    Command,
    Event,
    Gone,
    Hello,
    Message,
    Preview,
    Refused,
    Relay,
    Sample,
    Unknown,
    Welcome,
    WireError,
    codec,
)
from agents.rundir import runs
from agents.rundir.local_machine import process_state, this_host
from agents.rundir.runs import RunError
from agents.rundir.socket_directory import (
    check_socket_directory,
    endpoints_in,
    make_socket_directory,
    remove_sockets,
)
from agents.transport.addresses import is_tcp
from agents.transport.keys import Role, find_key, key_folder
from agents.transport.open_files import raise_file_limit
from agents.transport.reconnecting import ReconnectingSocket
from agents.transport.server_sockets import ServerSocket

FLUSH_MS = 20  # between two batches to the hub
IDLE_MS = 200
FRAMES_A_ROUND = 1024
HELLO_S = 1.0  # between two introductions to a hub that keeps asking
COMPLAIN_S = 5.0  # between two events on what ranks sent and is not passed on
UNHEARD_S = 60.0  # a rank silent for so long is not one of ours any more
LEAVE_S = 0.5


@dataclass
class _Rank:
    peer: bytes
    hello: Hello
    heard_s: float


class Node:
    """The ranks of one node and the way to the hub; `run` returns after `stop`."""

    def __init__(self, run: str, line: ReconnectingSocket, server_socket: ServerSocket) -> None:
        self._me = Relay(protocol.VERSION, run, this_host(), os.getpid())
        self._line = line
        self._server_socket = server_socket
        self._epoch = secrets.token_hex(8)
        self._ranks: dict[int, _Rank] = {}
        self._by_peer: dict[bytes, int] = {}
        self._relay_queue = RelayQueue()
        self._introduced_s = -HELLO_S
        self._complained_s = -COMPLAIN_S
        self._turned_away: str | None = None  # why the hub does not let us in
        self._stopping = False

    def stop(self) -> None:
        """Ask `run` to return; may be called from a signal handler."""
        self._stopping = True

    def run(self, parent: int | None = None) -> None:
        poller = zmq.Poller()
        poller.register(self._server_socket.socket, zmq.POLLIN)
        poller.register(self._line.socket, zmq.POLLIN)
        self._introduce(time.monotonic())
        while not self._stopping:
            poller.poll(FLUSH_MS if self._relay_queue else IDLE_MS)
            self._round(time.monotonic())
            if parent is not None and process_state(parent) == "ended":
                self.stop()
            if self._relay_queue:
                time.sleep(FLUSH_MS / 1000)  # so that a batch is of many ranks
        self._round(time.monotonic())
        self._line.close(int(1000 * LEAVE_S))
        self._server_socket.socket.close()

    def _round(self, now: float) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(FRAMES_A_ROUND):
                came = self._server_socket.receive()
                self._from_rank(came.peer, came.frames, now)
        with contextlib.suppress(zmq.Again):
            for _ in range(FRAMES_A_ROUND):
                self._from_hub(self._line.socket.recv(zmq.NOBLOCK), now)
        self._line.look()
        if self._line.refusal != self._turned_away:
            self._turned_away = self._line.refusal
            self._tell_turned_away()
        lost = self._relay_queue.flush(self._send)
        if lost:
            text = f"the relay on {self._me.host} left out {lost} records: the hub took no more, and has the newest"
            self._relay_queue.put(Event(time.time(), "warning", self._some_rank(), text))
        for rank in [rank for rank, one in self._ranks.items() if now - one.heard_s > UNHEARD_S]:
            self._forget(rank)

    def _tell_turned_away(self) -> None:
        why = self._turned_away
        if why:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"the relay on {self._me.host}: {protocol.clean(why)}\n")
                sys.stderr.flush()
            self._tell(self._peers([]), Refused(protocol.clip(why)))

    def _some_rank(self) -> str:
        return f"rank {next(iter(self._ranks), 0)}"

    def _send(self, frame: bytes) -> bool:
        try:
            self._line.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # --------------------------------------------------------------------------------------------- from ranks

    def _from_rank(self, peer: bytes, frames: list[bytes], now: float) -> None:
        try:
            if len(frames) != 1:
                raise WireError(f"a message has one frame, and this has {len(frames)}")
            messages = codec.decode_each(frames[0])
        except WireError as error:
            self._tell([peer], Refused(protocol.clip(str(error))))
            return
        for message in messages:
            if isinstance(message, Hello):
                refusal = self._enter(peer, message, now)
                if refusal:
                    self._tell([peer], Refused(protocol.clip(refusal)))
                    return
            rank = self._by_peer.get(peer)
            if rank is None and isinstance(message, Unknown) and message.why:
                self._tell([peer], Refused(protocol.clip(f"not a frame of ours: {message.why}")))
                return
            if rank is None:
                self._tell([peer], Welcome(self._epoch))
                return
            self._ranks[rank].heard_s = now
            if not self._may(rank, message):
                self._complain(rank, message, now)
                continue
            if isinstance(message, Event):
                message = Event(message.time_s, message.level, f"rank {rank}", message.text)
            self._relay_queue.put(message)
            if isinstance(message, Gone):
                self._forget(rank)

    def _may(self, rank: int, message: AnyMessage) -> bool:
        """Nobody speaks for another, and nobody sends what would spoil the batch for all: the hub sees one peer."""
        if isinstance(message, OF_THE_JOB):
            return rank == 0 or self._ranks[rank].hello.leader
        if isinstance(message, (Hello, *OF_ITSELF)):
            return message.rank == rank
        return isinstance(message, Event)

    def _complain(self, rank: int, message: AnyMessage, now: float) -> None:
        """What is not passed on is told to the hub, once in a while; a newer kind, which nobody here knows, is not."""
        if isinstance(message, Unknown):
            what = f"a {message.kind} that cannot be: {message.why}" if message.why else ""
        else:
            what = f"a {type(message).__name__.lower()}, which it may not send"
        if what and now - self._complained_s >= COMPLAIN_S:
            self._complained_s = now
            text = protocol.clip(f"it sent {what}; dropped")
            self._relay_queue.put(Event(time.time(), "warning", f"rank {rank}", text))

    def _enter(self, peer: bytes, hello: Hello, now: float) -> str | None:
        """Enter a rank; a sentence if another process has that number."""
        other = self._ranks.get(hello.rank)
        if other and other.peer != peer and now - other.heard_s < SUCCESSION_S:
            was = other.hello
            if (was.host, was.pid) != (hello.host, hello.pid):
                return f"rank {hello.rank} is connected already, as process {was.pid} on {was.host}"
        before = self._by_peer.get(peer)
        if before is not None and before != hello.rank:
            self._forget(before)
        known = self._ranks.get(hello.rank)
        if known:
            self._by_peer.pop(known.peer, None)
        self._ranks[hello.rank] = _Rank(peer, hello, now)
        self._by_peer[peer] = hello.rank
        if self._turned_away:
            self._tell([peer], Refused(protocol.clip(self._turned_away)))
        return None

    def _forget(self, rank: int) -> None:
        self._by_peer.pop(self._ranks.pop(rank).peer, None)

    # --------------------------------------------------------------------------------------------- from the hub

    def _from_hub(self, frame: bytes, now: float) -> None:
        try:
            messages = codec.decode_each(frame)
        except WireError:
            return  # not a hub, or not one of this release: its ranks go without, as with no hub at all
        for message in messages:
            self._pass_down(message, now)

    def _pass_down(self, message: AnyMessage, now: float) -> None:
        match message:
            case Welcome(ranks=ranks):
                if ranks or self._introduce(now):
                    self._tell(self._peers(ranks), Welcome(message.epoch))
            case Refused(rank=rank):
                self._tell(self._peers([] if rank is None else [rank]), Refused(message.why))
            case Sample(ranks=ranks):
                self._tell(self._peers(ranks), message)
            case Command() | Preview():
                self._tell([one.peer for one in self._ranks.values() if one.hello.leader], message)

    def _introduce(self, now: float) -> bool:
        """Say who this is, unless that is on its way already: a hub asks once a frame."""
        if now - self._introduced_s < HELLO_S:
            return False
        self._introduced_s = now
        self._relay_queue.put_first(self._me)
        return True

    def _peers(self, ranks: Iterable[int]) -> list[bytes]:
        """The connections of those of our ranks that are named; of all, if none is."""
        named = list(ranks) or list(self._ranks)
        return [self._ranks[rank].peer for rank in named if rank in self._ranks]

    def _tell(self, peers: Iterable[bytes], message: Message) -> None:
        frame = codec.encode([message])
        for peer in peers:
            self._server_socket.send(peer, frame)


# --------------------------------------------------------------------------------------------- the process


def main(
    words: Words[str] | None = None, prog: str = "python -m agents.hub.relay", in_terminal: bool = False
) -> int:
    """0 after SIGTERM (in a terminal, Ctrl-C) or when the parent has ended; exit 2 if it cannot start."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Speaks to a run's hub for the ranks of one node."
    )
    parser.add_argument("--run", required=True, help="the name of the run")
    parser.add_argument("--hub", required=True, metavar="RUN|URL", help="its run's folder, ipc:// or tcp://")
    parser.add_argument(
        "--sockets", type=Path, help="the directory for the socket of the ranks; by default a new private one"
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="of the role rank, for a hub over TCP")
    parser.add_argument("--parent", type=int, help="a process id; when it has ended, so does the relay")
    arguments = parser.parse_args(words)
    if not in_terminal:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when the relay ends
    raise_file_limit()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sockets = arguments.sockets or make_socket_directory()
        check_socket_directory(sockets)
        endpoints = endpoints_in(sockets)
        found = runs.resolve(arguments.hub, Path("runs"))
        hub = found.ranks
        key = find_key([Role.RANK], arguments.key, key_folder(found), found.hub) if is_tcp(hub) else None
        line = ReconnectingSocket(hub, key, immediate=True, high_water=16, reconnect_max_ms=2000)
        server_socket = ServerSocket(context, b"r", Role.RANK)
        server_socket.bind(endpoints.ranks)
    except (RunError, OSError) as error:
        parser.exit(2, f"the relay cannot start: {protocol.clean(str(error))}\n")
    node = Node(arguments.run, line, server_socket)
    for ending in (signal.SIGTERM, signal.SIGHUP, *([signal.SIGINT] if in_terminal else [])):
        signal.signal(ending, lambda _signal, _frame: node.stop())
    sys.stdout.write(f"{endpoints.ranks}\n")  # where the ranks of this node are to connect
    sys.stdout.flush()
    node.run(arguments.parent)
    context.term()
    remove_sockets(endpoints)
    return 0


if __name__ == "__main__":
    sys.exit(main())
