"""`hub.json` in a run's folder: how to reach the hub of the run."""

import contextlib
import fcntl
import time
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import psutil
from msgspec import Meta, Struct

from agents.protocol.base import RunError
from agents.rundir.bounded_read import read_ordinary
from agents.rundir.failure_file import last_failure
from agents.rundir.local_machine import Machine, process_state, this_host, this_machine
from agents.rundir.socket_directory import socket_answers
from agents.transport.addresses import Endpoints
from agents.transport.open_files import open_lock, replace_file

HUB_FILE = "hub.json"
LOCK_FILE = ".hub.lock"
ENDING_S = 3.0
HUB_FILE_BYTES = 64 << 10  # maximum number of bytes read; a real file has a few hundred


class ElsewhereError(RunError):
    """The hub runs on another machine and cannot be reached from this one."""


class CopiedError(RunError):
    """The folder is a copy of the folder of a run, whose hub serves only the original."""


class HubFile(Struct, frozen=True, omit_defaults=True):
    """Content of `hub.json`: everything that a peer needs to connect to the hub of a run."""

    run: str
    epoch: str  # identifies the hub process
    endpoints: Endpoints
    pid: Annotated[int, Meta(gt=0)]
    wire: int  # the hub's wire version
    started_s: float
    host: str = ""  # the name of the machine that the hub runs on
    tcp: Endpoints | None = None  # TCP endpoints, for peers with a key
    machine: str = ""  # `this_machine` of the hub; empty for hubs of earlier releases
    start: int = 0  # `process_start` of the hub; 0: unknown
    # Device and inode of the folder for which the hub wrote this file, so that a copy of the folder is not taken for
    # the run.
    folder: tuple[int, int] | None = None

    @property
    def here(self) -> bool:
        """Whether the hub runs on this machine, so that its sockets can be reached from here.

        A hub in another container of this machine, which has process ids of its own, counts as here if its socket
        answers.
        """
        if not self.machine:  # a hub of an earlier release
            return self.host in ("", this_host())
        if self.machine == this_machine() or self._before_restart:
            return True
        same = Machine.parse(self.machine).kernel == Machine.parse(this_machine()).kernel
        return same and any(socket_answers(path) for path in self.endpoints.paths)

    @property
    def _before_restart(self) -> bool:
        """Whether this machine has been restarted since the hub started on it, so that the hub has ended."""
        own, its = Machine.parse(this_machine()), Machine.parse(self.machine)
        same = bool(own.installation) and own.installation == its.installation and self.host == this_host()
        return same and own.boot != its.boot and self.started_s < psutil.boot_time()

    @property
    def live(self) -> bool:
        """Whether the hub's process and its socket directory both exist. The process id alone is not enough, because it
        may have been reused. A hub that listens on TCP may have a directory that only its container sees.

        A hub on another machine is regarded as live if it listens on TCP, because its process cannot be checked.
        """
        if not self.here:
            return self.tcp is not None
        if self.machine and self.machine != this_machine():
            return not self._before_restart  # its process cannot be checked, but its socket answers
        reachable = self.tcp is not None or self.endpoints.directory.is_dir()
        return process_state(self.pid, self.start) != "ended" and reachable


def write_hub_file(folder: Path, hub: HubFile) -> None:
    """Replace `hub.json` atomically."""
    text = msgspec.json.format(msgspec.json.encode(hub), indent=2)
    replace_file(folder / HUB_FILE, text + b"\n")


def read_hub_file(folder: Path) -> HubFile:
    """Read `hub.json` of a run folder. Raises RunError, with a one-sentence message, if there is no hub, or if the
    folder is a copy of the folder for which the hub wrote the file."""
    path = folder / HUB_FILE
    try:
        hub = msgspec.json.decode(read_ordinary(path, HUB_FILE_BYTES), type=HubFile)
        own = folder_identity(folder)
    except FileNotFoundError:
        failure = last_failure(folder)
        how = f"it has ended: {failure}" if failure else f"it has ended, or it has no hub (no {HUB_FILE})"
        raise RunError(f"no hub serves the run {folder}: {how}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{path} is not a hub file: {error}") from None
    # Two machines that share a file system give its device different numbers.
    first = 0 if hub.machine == this_machine() else 1
    if hub.folder is not None and hub.folder[first:] != own[first:]:
        raise CopiedError(
            f"no hub serves the run {folder}: it is a copy of the folder of a run, and the hub of the run serves "
            "only the original"
        )
    return hub


def folder_identity(folder: Path) -> tuple[int, int]:
    """The device and the inode of a folder (`HubFile.folder`)."""
    found = folder.stat()
    return found.st_dev, found.st_ino


def remove_hub_file(folder: Path, epoch: str) -> None:
    """Remove `hub.json`, unless a newer hub process has replaced it. `epoch` identifies the caller's hub process."""
    with contextlib.suppress(RunError):
        if read_hub_file(folder).epoch == epoch:
            (folder / HUB_FILE).unlink(missing_ok=True)


def lock_for_hub(folder: Path) -> BinaryIO:
    """Lock the run folder, so that no second hub uses it while the returned file is open. Raises RunError if another
    hub has locked it."""
    path = folder / LOCK_FILE
    try:
        lock = open_lock(path)
    except OSError as error:
        raise RunError(f"{path} cannot be locked: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RunError(f"another hub already serves {folder}") from None
    return lock


def check_unserved(folder: Path) -> None:
    """Raise RunError if the hub of another job uses the folder. The hub of a job that has just ended gets
    `ENDING_S` seconds to end."""
    until = time.monotonic() + ENDING_S
    while (folder / LOCK_FILE).exists():
        try:
            lock_for_hub(folder).close()
            return
        except RunError as error:
            if time.monotonic() >= until:
                raise RunError(
                    f"{error}: another job uses this folder; give this job another name or folder"
                ) from None
        time.sleep(0.05)


def check_readable(folder: Path) -> None:
    """Raise RunError if a hub on another machine writes the databases of this run.

    SQLite keeps the index of its write-ahead log in shared memory, so only the machine that writes a database can read
    it.
    """
    try:
        hub = read_hub_file(folder)
    except RunError:
        return  # the run has ended, or it has no hub
    if not hub.here:
        raise ElsewhereError(
            f"the recording in {folder} is being written on {hub.host}, and cannot be read from another machine until "
            f"the run has ended; run this on {hub.host} (if that hub was killed and will not restart, remove "
            f"{folder / HUB_FILE})"
        )
