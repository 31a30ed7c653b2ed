"""A run's folder and how its hub is found: `hub.json`, and the directory of the hub's sockets."""

import contextlib
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from agents.protocol import VERSION
from agents.protocol.base import RunError as RunError
from agents.protocol.codec import version_refusal
from agents.rundir.bounded_read import open_ordinary, read_ordinary
from agents.transport.addresses import Endpoints, connect_address

NAMED = 8  # runs that an error names
HUB_FILE = "hub.json"
HUB_FILE_BYTES = 64 << 10  # read of it; an honest one has a few hundred
RECORD_FILE = "run.db"
COMMANDS_FILE = "commands.db"
FAILURE_BYTES = 64 << 20  # read of its end: the reports of a thousand ranks
FAILURE_FILE = "failure.txt"  # the launcher writes it: a line with date, time and the cause, then the reports
STARTED_AGAIN = "the run was started again"  # in that file, after the cause of an earlier end
_FAILURE_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.+)")
_PROCESS_STATES: Final[dict[str, Literal["ended", "stopped"]]] = {"Z": "ended", "X": "ended", "T": "stopped"}
LONGEST_SOCKET_PATH = 107  # bytes; sun_path holds 108 with its closing zero


class ElsewhereError(RunError):
    """The hub is alive, as far as anyone knows, and cannot be reached from this machine."""


class HubFile(Struct, frozen=True, omit_defaults=True):
    """`hub.json`: what anyone needs to reach the hub of a run."""

    run: str
    epoch: str  # a new one at each hub start
    endpoints: Endpoints
    pid: int
    wire: int  # the wire version the hub speaks
    started_s: float
    host: str = ""  # where it runs
    tcp: Endpoints | None = None  # where it listens over TCP too, for peers with a key

    @property
    def here(self) -> bool:
        """Whether the hub runs on this machine."""
        return self.host in ("", this_host())

    @property
    def live(self) -> bool:
        """The hub's process exists, and so do its sockets: a process id alone may have been given anew.

        Of a hub on another machine nothing is known but that it has not ended in good order.
        """
        if not self.here:
            return self.tcp is not None
        return process_state(self.pid) != "ended" and self.endpoints.directory.is_dir()


class Run(Struct, frozen=True):
    """One run folder; `hub` is its last hub if that was killed, and None if it ended in good order."""

    name: str
    folder: Path
    hub: HubFile | None

    @property
    def live(self) -> bool:
        return self.hub is not None and self.hub.live


def process_state(pid: int) -> Literal["ended", "stopped", "alive"]:
    """`ended`, `stopped` or `alive`: what this machine knows of a process."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return "ended"
    except PermissionError:
        return "alive"
    with contextlib.suppress(OSError, IndexError):
        # The field after the command's closing parenthesis; a zombie answers signals and yet has ended.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return _PROCESS_STATES.get(letter, "alive")
    return "alive"


# ------------------------------------------------------------------------------------------- sockets


def endpoints_in(directory: Path) -> Endpoints:
    """The endpoints of a hub whose sockets lie in `directory`; RunError if that is too long a path."""
    for name in ("ranks", "clients"):
        length = len(os.fsencode(directory / name))
        if length > LONGEST_SOCKET_PATH:
            raise RunError(
                f"the socket path {directory / name} has {length} bytes and a socket takes "
                f"{LONGEST_SOCKET_PATH}; name a shorter directory, or set XDG_RUNTIME_DIR to one"
            )
    return Endpoints(ranks=f"ipc://{directory / 'ranks'}", clients=f"ipc://{directory / 'clients'}")


def make_socket_directory() -> Path:
    """A new private directory (mode 0700) with a short path, for the sockets of one hub."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = runtime and os.access(runtime, os.W_OK | os.X_OK)
    for parent in (runtime, tempfile.gettempdir()) if usable else (tempfile.gettempdir(),):
        directory = Path(tempfile.mkdtemp(prefix="cockpit-", dir=parent))
        try:
            endpoints_in(directory)
        except RunError as error:
            directory.rmdir()
            problem = error
        else:
            return directory
    raise problem


def check_socket_directory(directory: Path) -> None:
    """Make `directory` if need be; RunError unless it is ours alone, for who can enter can connect."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise RunError(f"the socket directory {directory} cannot be used: {error.strerror}") from None
    _check_ours(directory, found)


def _check_private(directory: Path) -> None:
    """RunError unless a socket directory that is there already is ours alone."""
    try:
        found = directory.lstat()
    except OSError as error:
        raise RunError(f"the socket directory {directory} cannot be used: {error.strerror}") from None
    _check_ours(directory, found)


def _check_ours(directory: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RunError(f"the socket directory {directory} must be a directory of yours with mode 0700")


def remove_sockets(endpoints: Endpoints) -> None:
    """Remove a hub's sockets, and their directory if nothing else is in it."""
    for endpoint in (endpoints.ranks, endpoints.clients):
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        endpoints.directory.rmdir()


# --------------------------------------------------------------------------------------------- hub.json


def write_hub_file(folder: Path, hub: HubFile) -> None:
    """Write `hub.json` so that a reader sees the old file or the new one, never half of one."""
    text = msgspec.json.format(msgspec.json.encode(hub), indent=2)
    unfinished = folder / f".{HUB_FILE}.{os.getpid()}"
    unfinished.write_bytes(text + b"\n")
    unfinished.replace(folder / HUB_FILE)


def last_failure(folder: Path, since_s: float = 0.0) -> str | None:
    """The sentence on why the run failed, if its launcher has written one since then and not started it again."""
    path = folder / FAILURE_FILE
    try:
        if path.stat().st_mtime < since_s:
            return None
        with open_ordinary(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - FAILURE_BYTES))
            lines = file.read(FAILURE_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    said = [found[1] for line in lines if (found := _FAILURE_LINE.fullmatch(line))]
    return said[-1] if said and said[-1] != STARTED_AGAIN else None


def forget_failure(folder: Path) -> None:
    """Why an earlier attempt failed is not why this one ends. Its reports stay in the file."""
    if last_failure(folder):
        with contextlib.suppress(OSError), (folder / FAILURE_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {STARTED_AGAIN}\n")


def read_hub_file(folder: Path) -> HubFile:
    """The hub of a run folder; RunError says in one sentence why there is none."""
    path = folder / HUB_FILE
    try:
        return msgspec.json.decode(read_ordinary(path, HUB_FILE_BYTES), type=HubFile)
    except FileNotFoundError:
        failure = last_failure(folder)
        how = f"it has ended: {failure}" if failure else f"it has ended, or went without one (no {HUB_FILE})"
        raise RunError(f"no hub serves the run {folder}: {how}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{path} is not a hub file: {error}") from None


def check_readable(folder: Path) -> None:
    """RunError if a hub on another machine writes the databases of this run: SQLite's write-ahead log has an index in
    memory that only the machine that writes it shares."""
    try:
        hub = read_hub_file(folder)
    except RunError:
        return  # it has ended, or went without one
    if not hub.here:
        raise ElsewhereError(
            f"the recording in {folder} is being written on {hub.host}, and cannot be read from another machine until "
            f"the run has ended; run this on {hub.host} (if that hub was killed for good, remove {folder / HUB_FILE})"
        )


def remove_hub_file(folder: Path, epoch: str) -> None:
    """Remove `hub.json` if it is still the one of the hub start `epoch`."""
    with contextlib.suppress(RunError):
        if read_hub_file(folder).epoch == epoch:
            (folder / HUB_FILE).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------ finding runs


def list_runs(runs_dir: Path) -> list[Run]:
    """Every run folder in `runs_dir`, the one touched last first."""
    return sorted(_runs(runs_dir), key=lambda run: (_touched_s(run.folder), run.name), reverse=True)


def newest_live(runs_dir: Path) -> Run | None:
    """The run whose hub started last, of those whose hub is alive; None if there is none."""
    live = (run for run in _runs(runs_dir) if run.live)
    return max(live, key=lambda run: run.hub.started_s if run.hub else 0.0, default=None)


def resolve(target: str | None, runs_dir: Path) -> Endpoints:
    """The endpoints of a live run, named by its name in `runs_dir`, its folder, or an ``ipc://`` or ``tcp://`` URL.

    An ipc URL names the socket directory or either socket in it. `None` is the newest live run. A hub on another
    machine, whose run folder is seen here, is reached over TCP. RunError: there is no such run, its hub is not alive,
    or it cannot be reached from here.
    """
    if target is None:
        newest = newest_live(runs_dir)
        if newest is None or newest.hub is None:
            ended = next((run.name for run in list_runs(runs_dir)), None)
            newest_ended = f"; the newest that has ended is {ended}" if ended else ""
            raise RunError(
                f"no run in {runs_dir.absolute()} is live{newest_ended}; start one, or name a run or its folder"
            )
        return _reached(newest.hub, newest.folder)
    if "://" in target:
        return _at_url(target)
    folder = find_folder(target, runs_dir)
    hub = read_hub_file(folder)
    if hub.wire != VERSION:
        raise RunError(f"{folder}: {version_refusal(hub.wire)}")
    if hub.here and not hub.live:
        raise RunError(
            f"the hub of {folder} (process {hub.pid}) is not alive; the run has ended or its hub was killed"
        )
    return _reached(hub, folder)


def _at_url(url: str) -> Endpoints:
    scheme, _, path = url.partition("://")
    if scheme == "tcp":
        return Endpoints(ranks=connect_address(url), clients=url)
    if scheme != "ipc" or not path:
        raise RunError(f"{url} is not a URL this release can reach; legal: ipc://DIRECTORY, tcp://HOST:PORT")
    named = Path(path)
    return endpoints_in(named.parent if named.name in ("ranks", "clients") else named)


def _reached(hub: HubFile, folder: Path) -> Endpoints:
    if hub.here:
        _check_private(hub.endpoints.directory)  # what one types may go there: not to whoever wrote the file
        return hub.endpoints
    if hub.tcp is None:
        raise ElsewhereError(
            f"the hub of {folder} runs on {hub.host} and listens there only; open the cockpit on {hub.host}, or "
            "start the run with --listen tcp://ADDRESS:auto"
        )
    return hub.tcp


def find_folder(target: str, runs_dir: Path) -> Path:
    """The folder of a run, live or not, named by its name in `runs_dir` or its folder; RunError: there is none."""
    try:
        folder = next((place for place in (runs_dir / target, Path(target)) if place.is_dir()), None)
    except OSError as error:
        raise RunError(f"a run cannot be named {target[:40]}…: {error.strerror}") from None
    if folder is None:
        names = [run.name for run in list_runs(runs_dir)]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        there = f"{', '.join(names[:NAMED])}{more}" or "none"
        raise RunError(f"there is no run {target} in {runs_dir}; the runs there are: {there}")
    return folder


def commands_file(folder: Path) -> Path:
    """Where the commands of a run are: an earlier release kept them in its recording."""
    path = folder / COMMANDS_FILE
    return path if path.exists() else folder / RECORD_FILE


def this_host() -> str:
    """The name by which ranks and the hub know this machine."""
    return socket.gethostname()


def _runs(runs_dir: Path) -> Iterator[Run]:
    try:
        folders = [entry for entry in runs_dir.iterdir() if entry.is_dir()]
    except OSError:
        return
    for folder in folders:
        if not any((folder / name).exists() for name in (HUB_FILE, RECORD_FILE, COMMANDS_FILE)):
            continue
        hub = None
        with contextlib.suppress(RunError):
            hub = read_hub_file(folder)
        yield Run(folder.name, folder, hub)


def _touched_s(folder: Path) -> float:
    try:
        return max((entry.stat().st_mtime for entry in folder.iterdir()), default=0.0)
    except OSError:
        return 0.0
