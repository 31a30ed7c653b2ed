"""An ssh connection that forwards the sockets of a run's hub to a private directory on this machine.

A single ssh process holds the connection. This process logs in with the user's ssh configuration, agent and jump hosts,
so a password is typed only once. On the other machine, ssh starts ``cockpit where``, which prints the hub's sockets and
then waits. The same ssh process then forwards the hub's sockets to this machine. When the connection is lost, the
forwarded sockets are removed, clients show the run as stale, and a thread reconnects.
"""

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from agents.protocol.base import RunError
from agents.rundir.socket_directory import make_socket_directory
from agents.transport.addresses import Endpoints, connect_address, is_tcp
from cockpit.cli.ssh.failures import NO_SSH, REMOTE, failure, forwarding_failure
from cockpit.cli.ssh.target import SshTarget, parse
from cockpit.cli.ssh.where import Where
from cockpit.data.format import age
from cockpit.data.sources.connection import CockpitError
from cockpit.data.sources.ssh_sockets import FILE, VARIABLE, Forwarded, forwarded_endpoints, write_forwarded
from cockpit.printing import complain

# Options of the connection. A dead connection is noticed after ALIVE_S * ALIVE_TIMES seconds.
ALIVE_S, ALIVE_TIMES = 5, 3
OPTIONS = (
    "ControlMaster=yes",  # so that a socket can be forwarded after the remote command has named it
    "ControlPersist=no",
    "ClearAllForwardings=yes",  # those of the user's configuration are for the user's own connections
    "RemoteCommand=none",
    "PermitLocalCommand=no",
    "RequestTTY=no",
    "ForwardAgent=no",
    "ForwardX11=no",
    "StreamLocalBindMask=0177",
    "ConnectTimeout=20",
    f"ServerAliveInterval={ALIVE_S}",
    f"ServerAliveCountMax={ALIVE_TIMES}",
)
AGAIN_S = 60.0  # how long an attempt to connect again may take
REQUEST_S = 10.0  # how long a request to the local ssh process, or the hub's first byte, may take
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 15.0
POLL_S = 0.2
LONGEST_ANSWER = 64 << 10  # bytes, with what the start-up files of the remote shell print
SHOWN_S = 2.0  # a shorter loss is not reported: Ctrl-C ends ssh too
CONTROL, MESSAGES = "control", "ssh.log"
SOCKETS = ("clients", "viewers")
_COMMAND = re.compile(r"[A-Za-z0-9/._][A-Za-z0-9/._+-]*", re.ASCII)
_SOCKET = re.compile(r"/[A-Za-z0-9/._+@-]+", re.ASCII)


def remote_command(*words: str) -> str:
    """The command line that the remote shell runs. Raises CockpitError if COCKPIT_REMOTE is not the path of a
    command."""
    command = os.environ.get(REMOTE) or "cockpit"
    if not _COMMAND.fullmatch(command):
        raise CockpitError(
            f"{REMOTE} = {command[:80]!r} is not the path of a command; legal: letters, digits and / . _ + -"
        )
    return shlex.join([command, *words])


def ssh_program() -> str:
    found = shutil.which("ssh")
    if found is None:
        raise CockpitError(NO_SSH)
    return found


class Tunnel:
    """The ssh connection to the hub of one run. `directory`: a private directory, in which the forwarded sockets
    `clients` and `viewers` are created."""

    def __init__(self, target: SshTarget, operator: bool, directory: Path):
        self._target, self._operator, self._directory = target, operator, directory
        self._ssh = ssh_program()
        self._process: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="ssh-tunnel", daemon=True)
        self._lost_s: float | None = None
        self._why = ""

    def open(self, again: bool = False) -> None:
        """Connect, and forward the hub's sockets. ssh may ask on the terminal for a password or for the confirmation of
        a host key, unless `again` is set. Raises CockpitError."""
        for name in (*SOCKETS, CONTROL, MESSAGES):
            (self._directory / name).unlink(missing_ok=True)
        with (self._directory / MESSAGES).open("ab") as messages:
            self._process = subprocess.Popen(
                self._command(again), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages
            )
        watchdog = threading.Timer(AGAIN_S, self._process.kill)
        if again:
            watchdog.start()
        try:
            self._forward(self._answer())
        except BaseException:
            self._end()
            raise
        finally:
            watchdog.cancel()

    def keep(self) -> None:
        """Start the thread that reconnects whenever the connection is lost."""
        self._thread.start()

    def close(self) -> None:
        """End the connection. If the connection was lost at least `SHOWN_S` seconds ago and has not been restored,
        print on standard error how long it has been lost, and why."""
        self._over.set()
        if (process := self._process) is not None:
            process.terminate()  # the thread may be waiting for its answer
        if self._thread.is_alive():
            self._thread.join(REQUEST_S)
        self._end()
        if self._lost_s is not None and time.monotonic() - self._lost_s >= SHOWN_S:
            lost = age(time.monotonic() - self._lost_s)
            complain(f"the ssh connection to {self._target.host} has been lost for {lost}: {self._why}")

    def _command(self, again: bool) -> list[str]:
        options = [
            *OPTIONS,
            f"ControlPath={self._directory / CONTROL}",
            f"BatchMode={'yes' if again else 'no'}",
        ]
        words = ["where", "--hold", *(["--operator"] if self._operator else [])]
        words += [f"--run={self._target.path}"] if self._target.path else []
        flags = [word for option in options for word in ("-o", option)]
        return [self._ssh, *flags, *self._target.arguments(), remote_command(*words)]

    def _answer(self) -> Where:
        """Read the line with the hub's sockets that the remote command prints. Other lines, such as the output of the
        shell's startup files, are skipped."""
        process = self._process  # `close` may set the attribute to None in the meantime
        assert process and process.stdout
        left = LONGEST_ANSWER
        while left > 0 and (line := process.stdout.readline(left)):
            left -= len(line)
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                return msgspec.json.decode(line, type=Where)
        if left <= 0:
            process.kill()
        status = process.wait()
        raise CockpitError(
            failure(self._target, status, self._printed(), os.environ.get(REMOTE) or "cockpit")
        )

    def _forward(self, found: Where) -> None:
        local = {name: self._directory / name for name in SOCKETS}
        ends = {"clients": found.clients} | ({"viewers": found.viewers} if found.viewers else {})
        for name, end in ends.items():
            self._request("-O", "forward", "-L", f"{local[name]}:{remote_end(end)}")
        viewers = f"ipc://{local['viewers']}" if found.viewers else ""
        clients = f"ipc://{local['clients']}"
        write_forwarded(
            self._directory,
            Forwarded(self._target.url, Endpoints(clients, clients, hub=found.hub, viewers=viewers)),
        )
        for name in ends:
            if not _greets(local[name]):
                raise CockpitError(forwarding_failure(self._target, self._printed()))

    def _request(self, *words: str) -> None:
        """Send a request to the local ssh process that holds the connection. The request is sent by a second ssh
        command, which needs no ssh configuration because the connection already exists."""
        control = str(self._directory / CONTROL)
        try:
            done = subprocess.run(
                [self._ssh, "-F", os.devnull, "-S", control, *words, "--", self._target.host],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=REQUEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CockpitError(
                f"ssh to {self._target.host} did not forward the hub's socket within {REQUEST_S:g} s"
            ) from None
        if done.returncode:
            raise CockpitError(forwarding_failure(self._target, done.stderr.decode(errors="replace")))

    def _printed(self) -> str:
        with contextlib.suppress(OSError), (self._directory / MESSAGES).open("rb") as messages:
            return _tail(messages).decode(errors="replace")
        return ""

    def _shorten_messages(self) -> None:
        """Truncate the file that contains ssh's messages if the file has become large, because ssh keeps appending."""
        messages = self._directory / MESSAGES
        with contextlib.suppress(OSError):
            if messages.stat().st_size > LONGEST_ANSWER:
                os.truncate(messages, 0)

    def _end(self) -> None:
        process, self._process = self._process, None
        for name in SOCKETS:
            (self._directory / name).unlink(missing_ok=True)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(POLL_S * 10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _keep(self) -> None:
        delay = FIRST_DELAY_S
        while not self._over.wait(POLL_S):
            if self._process is not None and self._process.poll() is None:
                self._shorten_messages()
                continue
            if self._lost_s is None:
                self._lost_s, self._why = time.monotonic(), self._reason()
            self._end()
            if self._over.wait(delay):
                return
            try:
                self.open(again=True)
            except (CockpitError, OSError, subprocess.SubprocessError) as error:
                self._why, delay = str(error), min(2 * delay, LONGEST_DELAY_S)
            else:
                self._lost_s, delay = None, FIRST_DELAY_S

    def _reason(self) -> str:
        status = self._process.poll() if self._process else None
        return failure(self._target, status or 255, self._printed(), "cockpit")


def remote_end(url: str) -> str:
    """The remote end of a forwarded socket, in the syntax of ``ssh -L``: the path of a socket, or HOST:PORT. Raises
    CockpitError if `url`, which the other machine reported, is neither of these."""
    if is_tcp(url):
        with contextlib.suppress(RunError):
            return connect_address(url).removeprefix("tcp://")
    path = url.removeprefix("ipc://")
    if path != url and _SOCKET.fullmatch(path):
        return path
    raise CockpitError(f"the other machine named {url[:80]!r}, which is not the socket of a hub")


def _greets(path: Path) -> bool:
    """Whether a ZeroMQ server answers at the socket: such a server sends a greeting as soon as a client connects."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(REQUEST_S)
        probe.connect(str(path))
        return bool(probe.recv(1))
    return False


def _tail(file: IO[bytes]) -> bytes:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - LONGEST_ANSWER))
    return file.read()


@contextlib.contextmanager
def tunnel_to(url: str, operator: bool) -> Iterator[None]:
    """Forward the sockets of the run at `url` while the context is open. Does nothing if the parent process
    already forwards these sockets."""
    target = parse(url)
    if forwarded_endpoints(url):
        yield
        return
    directory = make_socket_directory()
    try:
        tunnel = Tunnel(target, operator, directory)
        try:
            tunnel.open()
            os.environ[VARIABLE] = str(directory)
            tunnel.keep()
            yield
        finally:
            os.environ.pop(VARIABLE, None)
            tunnel.close()
    finally:
        for name in (*SOCKETS, CONTROL, MESSAGES, FILE):
            (directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            directory.rmdir()
