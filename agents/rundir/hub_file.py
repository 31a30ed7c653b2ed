"""`hub.json` in a run's folder: how to reach the hub of the run."""

import contextlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from agents.protocol.base import RunError
from agents.rundir.bounded_read import read_ordinary
from agents.rundir.failure_file import last_failure
from agents.rundir.local_machine import process_state, this_host
from agents.transport.addresses import Endpoints
from agents.transport.open_files import replace_file

HUB_FILE = "hub.json"
HUB_FILE_BYTES = 64 << 10  # maximum number of bytes read; a real file has a few hundred


class ElsewhereError(RunError):
    """The hub runs on another machine and cannot be reached from this one."""


class HubFile(Struct, frozen=True, omit_defaults=True):
    """Content of `hub.json`: everything that a peer needs to connect to the hub of a run."""

    run: str
    epoch: str  # identifies the hub process
    endpoints: Endpoints
    pid: Annotated[int, Meta(gt=0)]
    wire: int  # the hub's wire version
    started_s: float
    host: str = ""  # the machine that the hub runs on
    tcp: Endpoints | None = None  # TCP endpoints, for peers with a key

    @property
    def here(self) -> bool:
        """Whether the hub runs on this machine."""
        return self.host in ("", this_host())

    @property
    def live(self) -> bool:
        """Whether the hub's process and its socket directory both exist. The process id alone is not enough, because it
        may have been reused.

        A hub on another machine is regarded as live if it listens on TCP, because its process cannot be checked.
        """
        if not self.here:
            return self.tcp is not None
        return process_state(self.pid) != "ended" and self.endpoints.directory.is_dir()


def write_hub_file(folder: Path, hub: HubFile) -> None:
    """Replace `hub.json` atomically."""
    text = msgspec.json.format(msgspec.json.encode(hub), indent=2)
    replace_file(folder / HUB_FILE, text + b"\n")


def read_hub_file(folder: Path) -> HubFile:
    """Read `hub.json` of a run folder. Raises RunError, with a one-sentence message, if there is no hub."""
    path = folder / HUB_FILE
    try:
        return msgspec.json.decode(read_ordinary(path, HUB_FILE_BYTES), type=HubFile)
    except FileNotFoundError:
        failure = last_failure(folder)
        how = f"it has ended: {failure}" if failure else f"it has ended, or it has no hub (no {HUB_FILE})"
        raise RunError(f"no hub serves the run {folder}: {how}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{path} is not a hub file: {error}") from None


def remove_hub_file(folder: Path, epoch: str) -> None:
    """Remove `hub.json`, unless a newer hub process has replaced it. `epoch` identifies the caller's hub process."""
    with contextlib.suppress(RunError):
        if read_hub_file(folder).epoch == epoch:
            (folder / HUB_FILE).unlink(missing_ok=True)


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
