"""What a forked rank does first and last: let go of its parent's things, do its work, end without hanging."""

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
STACKS_SIGNAL = signal.SIGUSR1  # asks a rank for its Python stacks, written even while it hangs in C
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Tie:
    """What a rank keeps of its parent."""

    parent: int  # its process id
    line: socket.socket  # up: done, or a report; down: leave to end; its end of file: the parent is gone
    stacks: IO[bytes]  # unlinked; the parent reads it when the rank has crashed or hangs


def run(place: RankContext, work: Work, tie: Tie) -> NoReturn:
    """Run `work` in this freshly forked process and end it; never returns into the parent's code.

    Comes with the stop signals blocked, so that none is lost before its handler stands.
    """
    status = 1
    try:
        status = _live(place, work, tie)
    finally:
        # No destructor, no atexit handler and no buffer of the parent's: a process group torn down by an
        # interpreter that ends would abort or wait for ranks that are dead.
        os._exit(status)


def _live(place: RankContext, work: Work, tie: Tie) -> int:
    try:
        allowed_to_end = _settle(place, tie)
        work(place)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - whatever ended the work, SystemExit too, is reported
        report = report_of(place.rank, place.last_operation(), error)
        _say(tie, msgspec.json.encode(report) + b"\n")
        flush()
        return 1
    _say(tie, DONE)
    if place.rank == 0:
        # The store lives in this process: whoever is still ending may need it.
        allowed_to_end.wait()
    flush()
    return 0


def _settle(place: RankContext, tie: Tie) -> threading.Event:
    """Handlers, output, cores, and the two watches over the parent; gives the event that lets rank 0 end."""
    signal.set_wakeup_fd(-1)  # the parent's
    signal.signal(signal.SIGTERM, place.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process: the parent decides
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
    """Ranks of one machine meet on the loopback, whatever its host name resolves to."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def share_cores(local_world: int) -> None:
    """Give torch, where it is loaded, this rank's share of the cores; OMP_NUM_THREADS goes first (torchrun sets 1)."""
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // local_world))


def _die_with_parent(parent: int) -> None:
    """Linux: the kernel kills this process when its parent dies, even while it hangs in C."""
    signal_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def signal_with_parent(number: int) -> None:
    """Linux: have the kernel send this process that signal when its parent dies, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _watch(line: socket.socket, allowed_to_end: threading.Event) -> None:
    """Everywhere: the line ends when the parent does, however it died."""
    try:
        word = line.recv(1)
    except OSError:
        word = b""
    if not word:
        os._exit(1)
    allowed_to_end.set()


def _say(tie: Tie, word: bytes) -> None:
    try:
        tie.line.sendall(word)
    except OSError:
        os._exit(1)  # no parent, nobody to tell


def flush() -> None:
    """Empty this process's own output, if anyone still reads it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
