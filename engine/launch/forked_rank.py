"""Life of a forked rank: release the parent's resources, do the work, exit without hanging."""

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

from engine.launch.failure import report_of
from engine.launch.outlet import outlet
from engine.launch.signals import STOP_SIGNALS
from engine.rendezvous import RankContext, Work, usable_cores

DONE = b"done\n"
STACKS_SIGNAL = signal.SIGUSR1  # makes a rank write its Python stacks, even while it hangs in C
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Tie:
    """Connection of a rank to its parent."""

    parent: int  # its process id
    line: socket.socket  # sends done or a report; receives permission to exit; end of file: the parent died
    stacks: IO[bytes]  # an unlinked file; the parent reads it when the rank has crashed or hangs


def run(place: RankContext, work: Work, tie: Tie) -> NoReturn:
    """Run `work` in this freshly forked process and end it; never returns into the parent's code.

    The stop signals are blocked on entry, so that none is lost before its handler is installed.
    """
    status = 1
    try:
        status = _live(place, work, tie)
    finally:
        # Skip destructors, atexit handlers and the parent's buffers: at interpreter exit, the teardown of a process
        # group would abort or wait for dead ranks.
        os._exit(status)


def _live(place: RankContext, work: Work, tie: Tie) -> int:
    try:
        allowed_to_end = _settle(place, tie)
        work(place)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - report every end of the work, SystemExit too
        report = report_of(place.rank, place.last_operation(), error)
        _send(tie, msgspec.json.encode(report) + b"\n")
        flush()
        return 1
    _send(tie, DONE)
    if place.rank == 0:
        # This process serves the store, which other ranks may still need.
        allowed_to_end.wait()
    flush()
    return 0


def _settle(place: RankContext, tie: Tie) -> threading.Event:
    """Set up signals, output, cores and two watches on the parent; returns the event that lets rank 0 exit."""
    signal.set_wakeup_fd(-1)  # the parent's
    signal.signal(signal.SIGTERM, place.stop)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the terminal sends SIGINT to every process; the parent handles it
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _die_with_parent(tie.parent)
    faulthandler.enable(file=tie.stacks)
    faulthandler.register(STACKS_SIGNAL, file=tie.stacks)
    sys.stdout = outlet()
    listen_on_loopback()
    share_cores(place.local_world)
    allowed_to_end = threading.Event()
    threading.Thread(target=_watch, args=(tie.line, allowed_to_end), name="parent-watch", daemon=True).start()
    return allowed_to_end


def listen_on_loopback() -> None:
    """Ranks of one machine connect over the loopback, whatever its host name resolves to."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def share_cores(local_world: int) -> None:
    """Limit torch, if loaded, to this rank's share of the cores. OMP_NUM_THREADS takes precedence (torchrun sets 1)."""
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // local_world))


def _die_with_parent(parent: int) -> None:
    """Linux: the kernel kills this process when its parent dies, even while it hangs in C."""
    signal_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def signal_with_parent(number: int) -> None:
    """Linux: the kernel sends this process the signal `number` when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _watch(line: socket.socket, allowed_to_end: threading.Event) -> None:
    """On every platform: the connection closes when the parent dies."""
    try:
        received = line.recv(1)
    except OSError:
        received = b""
    if not received:
        os._exit(1)
    allowed_to_end.set()


def _send(tie: Tie, message: bytes) -> None:
    try:
        tie.line.sendall(message)
    except OSError:
        os._exit(1)  # the parent has died


def flush() -> None:
    """Flush this process's output; errors are ignored."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
