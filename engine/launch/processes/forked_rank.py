"""Runs one forked rank: the rank replaces the parent's signal handling, does its work, and exits without hanging."""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, NoReturn

import msgspec

from engine.launch.processes.standard_output import standard_stream
from engine.launch.supervision.failure import DONE, report_of
from engine.launch.supervision.signals import SAVE_SIGNAL_TO_RANK, STACKS_SIGNAL, STOP_SIGNALS
from engine.rendezvous import RankContext, Work, usable_cores

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ParentConnection:
    """What a forked rank shares with its parent process: a socket for messages, and a file for Python stacks."""

    parent: int  # process id of the parent
    # The rank sends `DONE` or a report, and receives permission to exit. End of file means that the parent has died.
    channel: socket.socket
    # File without a name, for Python stacks; the parent reads it when the rank has crashed or hangs.
    stacks: IO[bytes]


def run(context: RankContext, work: Work, connection: ParentConnection) -> NoReturn:
    """Run `work` in this newly forked process, then exit the process. This function does not return.

    The caller has blocked the stop signals, so that none is lost before the rank has installed its handlers.
    """
    status = 1
    try:
        status = _run(context, work, connection)
    finally:
        # Skip destructors, atexit handlers and buffers copied from the parent: at a normal interpreter exit, the
        # teardown of a process group would abort or wait for dead ranks.
        os._exit(status)


def _run(context: RankContext, work: Work, connection: ParentConnection) -> int:
    try:
        allowed_to_end = _set_up(context, connection)
        work(context)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - report every exception, also SystemExit
        report = report_of(context.rank, context.last_operation(), error)
        _send(connection, msgspec.json.encode(report) + b"\n")
        flush()
        return 1
    _send(connection, DONE)
    if context.rank == 0:
        # This process serves the store, and other ranks may still need it.
        allowed_to_end.wait()
    flush()
    return 0


def _set_up(context: RankContext, connection: ParentConnection) -> threading.Event:
    """Set up signal handling, standard output, the number of torch's threads, and the two mechanisms that detect the
    parent's death. Returns an event that is set when the parent permits this rank to exit; only rank 0 waits for it."""
    signal.set_wakeup_fd(-1)  # inherited from the parent
    signal.signal(signal.SIGTERM, context.stop)
    signal.signal(SAVE_SIGNAL_TO_RANK, context.save)
    # The terminal sends SIGINT to every process; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _die_with_parent(connection.parent)
    faulthandler.enable(file=connection.stacks)
    faulthandler.register(STACKS_SIGNAL, file=connection.stacks)
    sys.stdout = standard_stream()
    listen_on_loopback()
    share_cores(context.local_world)
    allowed_to_end = threading.Event()
    threading.Thread(
        target=_watch, args=(connection.channel, allowed_to_end), name="parent-watch", daemon=True
    ).start()
    return allowed_to_end


def listen_on_loopback() -> None:
    """Make gloo use the loopback interface, for ranks that are all on one machine. By default, gloo uses the address
    that the host name resolves to."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def share_cores(local_world: int) -> None:
    """Limit torch's threads, if torch is imported, to this rank's share of the cores. OMP_NUM_THREADS takes precedence
    (torchrun sets it to 1)."""
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // local_world))


def _die_with_parent(parent: int) -> None:
    """On Linux, make the kernel kill this process when its parent dies, even if the process hangs in C code."""
    signal_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def signal_with_parent(number: int) -> None:
    """On Linux, make the kernel send the signal `number` to this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _watch(line: socket.socket, allowed_to_end: threading.Event) -> None:
    """Wait for the parent's permission to exit. If the parent dies, the channel closes and this process exits at once.
    Unlike `_die_with_parent`, this works on every platform.
    """
    try:
        received = line.recv(1)
    except OSError:
        received = b""
    if not received:
        os._exit(1)
    allowed_to_end.set()


def _send(connection: ParentConnection, message: bytes) -> None:
    try:
        connection.channel.sendall(message)
    except OSError:
        os._exit(1)  # the parent has died


def flush() -> None:
    """Flush stdout and stderr of this process; ignore errors."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
