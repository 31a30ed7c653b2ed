"""Keeps a hub process alive beside a run. Whatever happens to the hub, the ranks do not notice."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from agents.rundir.hub_file import read_hub_file
from agents.rundir.runs import RunError, resolve
from agents.rundir.socket_directory import endpoints_in, make_socket_directory, remove_sockets
from agents.transport.addresses import Endpoints, endpoint, is_tcp, listen_address, own_address
from agents.transport.keys import Key, Role, find_key, key_folder

RESTARTS_A_MINUTE = 6
FIRST_DELAY_S = 0.1  # doubled at each restart within the minute
CLOSE_S = 3.0
TELL_S = 12.0  # beyond that, where a hub has somebody to tell of alerts
ON_ALERT = "COCKPIT_ON_ALERT"
START_S = 20.0  # for a hub to listen on TCP, where other machines wait for it
LOOK_S = 0.5


def say(text: str) -> None:
    """Write `text`, which ends its own lines, to stderr, if anyone still listens."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


class HubSupervisor:
    """Starts a hub, restarts it on the same sockets when it dies, ends it. Has no thread: `tick` is called.

    What the hub prints goes to `log`, appended.
    """

    def __init__(self, argv: Sequence[str], log: Path):
        self._argv = list(argv)
        self._log = log
        self._hub: subprocess.Popen[bytes] | None = None
        self._starts: deque[float] = deque(maxlen=RESTARTS_A_MINUTE)
        self._due = 0.0  # monotonic seconds at which to start again
        self._complained = False

    @property
    def pid(self) -> int | None:
        """The hub's process, None while there is none."""
        return self._hub.pid if self._hub else None

    def start(self) -> None:
        """Start the hub without waiting for it. Never raises: a hub that cannot start is one that died."""
        self._starts.append(time.monotonic())
        try:
            with self._log.open("ab") as log:
                # A group of its own: Ctrl-C in a terminal is for the launcher, which ends the hub last.
                self._hub = subprocess.Popen(
                    self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
                )
        except OSError as error:
            self._hub = None
            self._plan_restart(f"could not be started ({error})")

    def tick(self) -> None:
        """See whether the hub lives; start it again if it is due. Microseconds, unless it starts one."""
        if self._hub is not None:
            status = self._hub.poll()
            if status is not None:
                self._hub = None
                self._plan_restart(_end(status))
        elif time.monotonic() >= self._due:
            self.start()

    def seconds_to_restart(self) -> float | None:
        """How long until `tick` has a hub to start; None while one lives."""
        return None if self._hub else max(0.0, self._due - time.monotonic())

    def _plan_restart(self, why: str) -> None:
        now = time.monotonic()
        recent = sum(now - start < 60 for start in self._starts)
        self._due = now + FIRST_DELAY_S * 2 ** (recent - 1)
        if recent >= RESTARTS_A_MINUTE:
            self._due = self._starts[0] + 60
            if not self._complained:
                self._complained = True
                say(f"the hub {why} again and again; the run goes on without it, {self._log} says why\n")

        self._note(f"the hub {why}; it is started again in {max(0.0, self._due - now):.1f} s")

    def _note(self, text: str) -> None:
        """A line in the log, since a hub that was killed has written nothing there."""
        with suppress(OSError), self._log.open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def close(self) -> None:
        """SIGTERM, up to 3 s to put its things away and longer where it tells somebody of alerts, SIGKILL."""
        hub, self._hub = self._hub, None
        if hub is None:
            return
        hub.terminate()
        try:
            hub.wait(CLOSE_S + (TELL_S if os.environ.get(ON_ALERT) else 0.0))
        except subprocess.TimeoutExpired:
            hub.kill()
            hub.wait()


def _end(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


class Reach(NamedTuple):
    """Where ranks reach a hub, and the key they come under over TCP."""

    endpoint: str
    key: Key | None = None


def reach(hub: Endpoints) -> Reach:
    """How a rank in this process reaches `hub`; RunError if it has no key to one that listens on TCP."""
    if not is_tcp(hub.ranks):
        return Reach(hub.ranks)
    return Reach(hub.ranks, find_key((Role.RANK,), folder=key_folder(hub), hub=hub.hub))


def named_hub(hub: str, run_dir: Path, listen: str | None = None) -> Reach | None:
    """How to reach a hub that someone else runs; None for "none", and for "auto", which is ours.

    Raises ValueError for a URL that names no hub or takes a key that is not here, and for a `listen` that cannot be.
    """
    if listen is not None:
        listen_address(listen)
        if hub != "auto":
            raise RunError(
                f"--listen {listen} is for a hub of our own, and --hub {hub} asks for none; drop one"
            )
    return None if hub in ("none", "auto") else reach(resolve(hub, run_dir.parent))


@contextmanager
def hub_of(
    hub: str, run: str, run_dir: Path, sockets: Path | None = None, listen: str | None = None
) -> Iterator[tuple[Reach | None, HubSupervisor | None]]:
    """How ranks of this machine reach the hub and, of one of our own, its keeper; that hub is ended on leaving.

    Its sockets lie in a new directory, which goes with it, or in `sockets`, which stays; at `listen` it listens over
    TCP too. Raises ValueError for a URL that names no hub.
    """
    if hub != "auto":
        yield named_hub(hub, run_dir), None
        return
    try:
        directory = sockets or make_socket_directory()
        endpoints = endpoints_in(directory)
    except (OSError, RunError) as error:
        say(f"the run goes without a hub: {error}\n")
        yield None, None
        return
    keeper = HubSupervisor(hub_command(run, run_dir, directory, listen), run_dir / "hub.log")
    keeper.start()
    try:
        yield Reach(endpoints.ranks), keeper
    finally:
        keeper.close()
        if sockets is None:
            remove_sockets(endpoints)  # a hub that was killed has left them


def hub_command(run: str, run_dir: Path, sockets: Path, listen: str | None = None) -> list[str]:
    """The command that is the hub of `run`; it ends by itself when this process does."""
    options = [f"--run={run}", "--dir", str(run_dir), "--sockets", str(sockets), "--parent", str(os.getpid())]
    if listen is not None:
        options += ["--listen", listen]
    return [sys.executable, "-m", "agents.hub", *options]


@contextmanager
def kept(keeper: HubSupervisor | None) -> Iterator[None]:
    """A thread looks after the hub while the work goes on."""
    if keeper is None:
        yield
        return
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            keeper.tick()

    thread = threading.Thread(target=look, name="hub-keeper", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def between_machines(towards: str, listen: str | None = None) -> str:
    """Where a hub listens for ranks of other machines, one of which is, or meets at, the host `towards`.

    RunError: there is no key that they could come under, or our own address is unclear; `listen` names it.
    """
    find_key((Role.RANK,))  # the others will want one like it
    return listen or endpoint(own_address(towards), "auto")


def listening(keeper: HubSupervisor, run_dir: Path) -> Endpoints:
    """Where the hub listens over TCP, once it does; RunError if it does not come to that."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with suppress(RunError):
            found = read_hub_file(run_dir)
            if found.pid == keeper.pid and found.tcp:
                return found.tcp
        keeper.tick()
        time.sleep(0.05)
    raise RunError(f"the hub does not listen after {START_S:g} s; {run_dir / 'hub.log'} says why")
