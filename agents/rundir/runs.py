"""Finds runs on disk: lists run folders, and resolves a run's name to the endpoints of its hub."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from agents.protocol import VERSION
from agents.protocol.base import RunError as RunError
from agents.protocol.codec import version_refusal
from agents.rundir.bounded_read import open_ordinary
from agents.rundir.hub_file import HUB_FILE, LOCK_FILE, ElsewhereError, HubFile, read_hub_file
from agents.rundir.socket_directory import SOCKETS, check_socket_directory, endpoints_in
from agents.transport.addresses import Endpoints, connect_address

NAME_BYTES = 200  # of a folder's name without its date; file systems allow 255 bytes
# Characters that a run's name may have and its folder's name may not.
_NOT_IN_FOLDERS = re.compile(r"[/\\\x00-\x1f\x7f]+")
NAMED = 8  # maximum number of runs listed in an error
RECORD_FILE = "run.db"
SQLITE = b"SQLite format 3\0"  # the first bytes of a database
COMMANDS_FILE = "commands.db"
HUB_LOG = "hub.log"


class Run(Struct, frozen=True):
    """One run folder. `hub` is the content of the folder's `hub.json`; None if the hub ended cleanly and removed the
    file."""

    name: str
    folder: Path
    hub: HubFile | None

    @property
    def live(self) -> bool:
        return self.hub is not None and self.hub.live


def folder_name(run: str) -> str:
    """A legal name of a folder directly in the folder of runs, so that `cockpit` finds it. A name of a run may contain
    other characters, and more bytes than the name of a file may have."""
    return _in_folders(run) or "run"


def _in_folders(run: str) -> str:
    name = _NOT_IN_FOLDERS.sub("-", run).lstrip(".").encode(errors="replace")[:NAME_BYTES]
    return name.decode(errors="ignore")


def check_path(folder: Path, what: str = "the run's folder") -> None:
    """Raise RunError if the path is not UTF-8: messages, hub.json and JSON output could not contain it."""
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError:
        raise RunError(
            f"{what} {printable(folder.absolute())} is not legal; legal: a path in UTF-8"
        ) from None


def printable(path: Path | str) -> str:
    """A path with its bytes that are not UTF-8 written as ``\\xff``."""
    return os.fsencode(path).decode(errors="backslashreplace")


def list_runs(runs_dir: Path) -> list[Run]:
    """All run folders in `runs_dir`, most recently modified first."""
    return sorted(_runs(runs_dir), key=lambda run: (_modified_s(run.folder), run.name), reverse=True)


def newest_live(runs_dir: Path) -> Run | None:
    """The live run whose hub started last; None if no run is live."""
    live = (run for run in _runs(runs_dir) if run.live)
    return max(live, key=lambda run: run.hub.started_s if run.hub else 0.0, default=None)


def only_live(runs_dir: Path) -> Run | None:
    """The live run that a change without a run's name refers to; None if no run is live. Raises RunError if several
    are: which of them gets the change must not depend on which started last.
    """
    live = sorted(run.name for run in _runs(runs_dir) if run.live)
    if len(live) > 1:
        raise RunError(f"{len(live)} runs are live, so name the one to change: {_listed(live)}")
    return newest_live(runs_dir)


def resolve(target: str | None, runs_dir: Path) -> Endpoints:
    """The socket addresses (endpoints) of the hub of a live run. `target` is the run's name in `runs_dir`, the run's
    folder, or an ``ipc://`` or ``tcp://`` URL.

    An ipc URL contains the path of the socket directory or of a socket in that directory. `None` selects the newest
    live run. If the hub of a run runs on another machine, its TCP address is read from `hub.json` in the run folder, so
    this folder must be on a file system that both machines share. Raises RunError if the run does not exist, if its hub
    is not alive, or if its hub cannot be reached from this machine.
    """
    if target is None:
        newest = newest_live(runs_dir)
        if newest is None or newest.hub is None:
            recorded = next((run.name for run in list_runs(runs_dir) if _is_recorded(run.folder)), None)
            newest_recorded = f"; the newest recorded run is {recorded}" if recorded else ""
            raise RunError(
                f"no run in {runs_dir.absolute()} is live{newest_recorded}; start one, or name a run or its folder"
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
    return endpoints_in(named.parent if named.name in SOCKETS else named)


def _reached(hub: HubFile, folder: Path) -> Endpoints:
    # Without its directory, the hub runs in a container of this machine that has another /tmp.
    if hub.here and (hub.tcp is None or hub.endpoints.directory.is_dir()):
        # Another user may have written hub.json; commands must not go to that user's sockets.
        check_socket_directory(hub.endpoints.directory, create=False)
        return hub.endpoints
    if hub.tcp is None:
        raise ElsewhereError(
            f"the hub of {folder} runs on {hub.host} and listens only there; open the cockpit on "
            f"{hub.host}, or "
            "start the run with --listen tcp://ADDRESS:auto"
        )
    return hub.tcp


def find_folder(target: str, runs_dir: Path) -> Path:
    """The folder of a run, live or ended. `target` is the name of a folder in `runs_dir`, a path, the name under which
    the screen shows a live run, or the beginning of only one folder's name. Raises RunError if there is no such folder
    or more than one, or if `target` is `runs_dir` or a folder above it."""
    try:
        folder = next((path for path in (runs_dir / target, Path(target)) if path.is_dir()), None)
        folder = folder or _meant(target, runs_dir)
        above = folder is not None and not _has_run(folder) and _holds(folder, runs_dir)
    except OSError as error:
        raise RunError(f"not a legal name of a run: {target[:40]}…: {error.strerror}") from None
    if folder is None or above or not target:
        names = [run.name for run in list_runs(runs_dir)]
        there = f"the runs there are: {_listed(names) or 'none'}"
        if not target:
            raise RunError(f"the name of the run is empty; name one in {runs_dir}; {there}")
        if above:
            raise RunError(
                f"{target} is not a run, but the folder of runs, {runs_dir}, or a folder above it; {there}"
            )
        raise RunError(f"there is no run {target} in {runs_dir}; {there}")
    return folder


def _meant(target: str, runs_dir: Path) -> Path | None:
    """The folder of the only live run named `target`, else the only folder whose name begins with `target`."""
    begin = _in_folders(target)
    if not begin:
        return None
    runs = list_runs(runs_dir)
    found = [run for run in runs if run.live and run.hub and run.hub.run == target]
    found = found or [run for run in runs if run.name.startswith(begin)]
    if len(found) > 1:
        raise RunError(f"{target} can be any of {len(found)} runs: {_listed([run.name for run in found])}")
    return found[0].folder if found else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def remove_unrecorded(folder: Path) -> None:
    """Remove the folder of a run whose hub has ended without a recording and without a message, because the run ended
    before a rank had joined."""
    journal = [COMMANDS_FILE + ending for ending in ("", "-wal", "-shm")]
    with contextlib.suppress(OSError):
        files = list(folder.iterdir())
        unused = {file.name for file in files} <= {HUB_LOG, LOCK_FILE, *journal}
        if unused and not any(file.name == HUB_LOG and file.stat().st_size for file in files):
            for file in files:
                file.unlink()
            folder.rmdir()


def _has_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (HUB_FILE, RECORD_FILE, COMMANDS_FILE))


def _holds(folder: Path, runs_dir: Path) -> bool:
    """Whether `folder` is `runs_dir` or a folder above it."""
    return runs_dir.is_dir() and runs_dir.resolve().is_relative_to(folder.resolve())


def commands_file(folder: Path) -> Path:
    """The database with the commands of a run. An earlier release stored the commands in the recording."""
    path = folder / COMMANDS_FILE
    return path if path.exists() else folder / RECORD_FILE


def _runs(runs_dir: Path) -> Iterator[Run]:
    try:
        folders = [entry for entry in runs_dir.iterdir() if entry.is_dir()]
    except OSError:
        return
    for folder in folders:
        if not _has_run(folder):
            continue
        hub = None
        with contextlib.suppress(RunError):
            hub = read_hub_file(folder)
        yield Run(folder.name, folder, hub)


def _is_recorded(folder: Path) -> bool:
    """Whether a folder contains a recording, possibly one that is still being written."""
    try:
        with open_ordinary(folder / RECORD_FILE) as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError:
        return False


def _modified_s(folder: Path) -> float:
    try:
        return max((entry.stat().st_mtime for entry in folder.iterdir()), default=0.0)
    except OSError:
        return 0.0
