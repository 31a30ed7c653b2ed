"""Starts the hub process of a run, or a relay, and restarts it when it dies. The ranks continue to train while the hub
or relay restarts.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from agents.rundir.alert_target import alert_target
from agents.rundir.hub_file import read_hub_file
from agents.rundir.runs import HUB_LOG, RunError, check_path, resolve
from agents.rundir.socket_directory import endpoints_in, make_socket_directory, remove_sockets
from agents.rundir.standard_streams import say as say
from agents.transport.addresses import Endpoints, endpoint, is_tcp, listen_address, own_address
from agents.transport.curve_keys import find_key, key_folder
from agents.transport.open_files import append_text, open_to_append
from agents.transport.reach import Reach
from agents.transport.roles import Role

RESTARTS_A_MINUTE = 6
FIRST_DELAY_S = 0.1  # delay before the first restart; doubled at each further restart within a minute
CLOSE_S = 6.0  # longer than a hub waits for the last messages of its ranks
NOTIFY_S = 2.0  # added to `CLOSE_S` if the hub runs a notification command
ON_ALERT = "COCKPIT_ON_ALERT"
START_S = 20.0  # how long to wait for a hub to listen on TCP
TICK_S = 0.5
# Ends a supervised hub or relay. A supervised process ignores SIGTERM: schedulers such as Slurm send it to every
# process of a job, but the hub must outlive the ranks to record their last steps.
END_SIGNAL = signal.SIGUSR2


class HubSupervisor:
    """Starts a hub, restarts it on the same sockets when it dies, and stops it. The caller must call `tick` regularly.

    The hub's output is appended to `log`. A relay is supervised in the same way; `what` is "hub" or "relay".
    """

    def __init__(
        self, argv: Sequence[str], log: Path, what: str = "hub", environ: Mapping[str, str] | None = None
    ):
        self._argv = list(argv)
        self._log = log
        self._what = what
        self._environ = environ
        self._hub: subprocess.Popen[bytes] | None = None
        self._starts: deque[float] = deque(maxlen=RESTARTS_A_MINUTE)
        self._due = 0.0  # monotonic time at which to start the hub again
        self._without_log = False  # whether the log cannot be opened
        self.failing = False  # whether the process has died `RESTARTS_A_MINUTE` times in a minute

    @property
    def pid(self) -> int | None:
        """Process id of the hub; None while it is not running."""
        return self._hub.pid if self._hub else None

    def start(self) -> None:
        """Start the hub without waiting for it. If the start fails, no error is raised; `tick` retries as if the hub
        had died.
        """
        self._starts.append(time.monotonic())
        try:
            with self._open_log() as log:
                # Its own process group: Ctrl-C then reaches only the launcher, which ends the hub last.
                self._hub = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                    env=self._environ,
                )
        except OSError as error:
            self._hub = None
            self._plan_restart(f"could not be started ({error})")

    def tick(self) -> None:
        """Check the hub. If it has died and the delay before its restart has passed, restart it. A call takes
        microseconds unless it starts a process.
        """
        if self._hub is not None:
            status = self._hub.poll()
            if status is not None:
                self._hub = None
                self._plan_restart(_end(status))
        elif time.monotonic() >= self._due:
            self.start()

    def seconds_to_restart(self) -> float | None:
        """Seconds until `tick` restarts the hub; None while it runs."""
        return None if self._hub else max(0.0, self._due - time.monotonic())

    def _plan_restart(self, why: str) -> None:
        now = time.monotonic()
        recent = sum(now - start < 60 for start in self._starts)
        self._due = now + FIRST_DELAY_S * 2 ** max(0, recent - 1)
        if recent >= RESTARTS_A_MINUTE:
            self._due = self._starts[0] + 60
            if not self.failing and self._what == "hub":
                say(f"the hub {why} repeatedly; the run continues without it, see {self._log}\n")
            self.failing = True

        self._note(f"the {self._what} {why}; it restarts in {max(0.0, self._due - now):.1f} s")

    def _note(self, text: str) -> None:
        """Write a line to the hub's log, because a killed hub cannot write one itself."""
        with suppress(OSError):
            append_text(self._log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _open_log(self) -> FileIO:
        try:
            return open_to_append(self._log)
        except OSError as error:
            if not self._without_log:
                self._without_log = True
                say(f"cannot write {self._log}: {error.strerror}; the {self._what} runs without it\n")
            return open(os.devnull, "wb", buffering=0)

    def close(self) -> None:
        """End the hub with `END_SIGNAL`, and after `CLOSE_S` seconds with SIGKILL; a hub with a notification command
        gets more time."""
        hub, self._hub = self._hub, None
        if hub is None:
            return
        hub.send_signal(END_SIGNAL)
        try:
            hub.wait(CLOSE_S + (NOTIFY_S if os.environ.get(ON_ALERT) else 0.0))
        except subprocess.TimeoutExpired:
            hub.kill()
            hub.wait()


def ending_signals(supervised: bool, in_terminal: bool) -> list[signal.Signals]:
    """Ignore signals that must not end this hub or relay, and return the signals that end it. `in_terminal`: whether
    the process was started in a terminal, where Ctrl-C must end it."""
    signal.signal(
        signal.SIGUSR1, signal.SIG_IGN
    )  # Slurm may send it to all processes of a job, to request a save
    if not in_terminal:
        # Ctrl-C in a terminal reaches the whole process group; the launcher decides when the hub ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not supervised:
        return [signal.SIGTERM, signal.SIGHUP, *([signal.SIGINT] if in_terminal else [])]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return [END_SIGNAL]


def _end(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def reach(hub: Endpoints) -> Reach:
    """How a rank in this process connects to `hub`; raises RunError if the endpoint is TCP and no key is found."""
    if not is_tcp(hub.ranks):
        return Reach(hub.ranks)
    folder = key_folder(hub)
    return Reach(hub.ranks, find_key((Role.RANK,), folder=folder, hub=hub.hub), folder)


def named_hub(hub: str, run_dir: Path, listen: str | None = None) -> Reach | None:
    """How to connect to the existing hub that `hub` refers to. Returns None if `hub` is "none" or "auto"; with "auto",
    the caller starts a hub itself.

    Raises RunError if `hub` does not refer to a live hub, if this user has no key for it, or if `listen` is invalid.
    """
    if listen is not None:
        listen_address(listen)
        if hub != "auto":
            raise RunError(
                f"--listen {listen} needs a hub that this run starts, but --hub {hub} starts none; drop one"
            )
    return None if hub in ("none", "auto") else reach(resolve(hub, run_dir.parent))


@contextmanager
def hub_of(
    hub: str, run: str, run_dir: Path, sockets: Path | None = None, listen: str | None = None
) -> Iterator[tuple[Reach | None, HubSupervisor | None]]:
    """Yield a `Reach`, by which ranks of this machine connect to the hub, and the hub's supervisor. If `hub` is "auto",
    this process starts the hub and ends it when the context closes; otherwise the supervisor is None.

    The hub's sockets are in the directory `sockets` or, if it is None, in a new directory. When the hub ends, it
    removes its sockets, and the directory if it is empty. If `sockets` is None, this process also removes the sockets
    and the new directory at the end, in case the hub was killed before it could do so. With `listen`, the hub also
    listens on TCP. Raises RunError if `hub` does not refer to a live hub.
    """
    if hub != "auto":
        yield named_hub(hub, run_dir), None
        return
    try:
        check_path(run_dir)
        directory = sockets or make_socket_directory()
        endpoints = endpoints_in(directory)
    except (OSError, RunError) as error:
        say(f"the run has no hub: {error}\n")
        yield None, None
        return
    command = hub_command(run, run_dir, directory, listen)
    supervisor = HubSupervisor(command, run_dir / HUB_LOG, environ=_environ_of_hub())
    supervisor.start()
    try:
        yield Reach(endpoints.ranks), supervisor
    finally:
        supervisor.close()
        if sockets is None:
            remove_sockets(endpoints)  # needed if the hub was killed and could not remove them


def _environ_of_hub() -> dict[str, str]:
    """A copy of this process's environment for the hub. An invalid alert target is reported on stderr and left out."""
    environ = dict(os.environ)
    try:
        if target := environ.get(ON_ALERT):
            alert_target(target)
    except RunError as error:
        say(f"{ON_ALERT}: {error}; the run continues and sends no alerts\n")
        del environ[ON_ALERT]
    return environ


def hub_command(run: str, run_dir: Path, sockets: Path, listen: str | None = None) -> list[str]:
    """The command line that starts the hub of `run`; the hub ends when this process ends."""
    options = [f"--run={run}", "--dir", str(run_dir), "--sockets", str(sockets), "--parent", str(os.getpid())]
    if listen is not None:
        options += ["--listen", listen]
    return [sys.executable, "-m", "agents.hub", *options]


@contextmanager
def kept(supervisor: HubSupervisor | None) -> Iterator[None]:
    """Call `tick` regularly, in a thread, while the context is open."""
    if supervisor is None:
        yield
        return
    over = threading.Event()

    def supervise() -> None:
        while not over.wait(TICK_S):
            supervisor.tick()

    thread = threading.Thread(target=supervise, name="hub-supervisor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def between_machines(towards: str, listen: str | None = None) -> str:
    """The TCP address on which a hub listens for ranks on other machines. Without `listen`, it has the local IP address
    from which this machine would connect to the host `towards`.

    Raises RunError if there is no key with the role `rank`, or if `listen` is not given and this machine's address
    cannot be determined.
    """
    find_key((Role.RANK,))  # ranks on the other machines need this key
    return listen or endpoint(own_address(towards), "auto")


def listening(supervisor: HubSupervisor, run_dir: Path) -> Endpoints:
    """Wait until the hub listens on TCP and return its endpoints. Raises RunError if the hub does not listen within
    `START_S` seconds."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with suppress(RunError):
            found = read_hub_file(run_dir)
            if found.pid == supervisor.pid and found.tcp:
                return found.tcp
        supervisor.tick()
        time.sleep(0.05)
    raise RunError(f"the hub does not listen after {START_S:g} s; see {run_dir / HUB_LOG}")
