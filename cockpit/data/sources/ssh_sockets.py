"""The local sockets that ssh forwards to the sockets of a run, for a run named by an ``ssh://`` URL.

The `cockpit` command opens the tunnel (`cockpit.cli.ssh.tunnel`) and stores the directory of the sockets in an
environment variable, so that child processes use the same tunnel.
"""

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from agents.protocol.base import RunError
from agents.rundir.bounded_read import read_ordinary
from agents.transport.addresses import Endpoints

SCHEME = "ssh://"
VARIABLE = "COCKPIT_SSH_SOCKETS"  # environment variable with the directory
FILE = "forwarded.json"
FILE_BYTES = 64 << 10


class Forwarded(Struct, frozen=True):
    """Which run the forwarded sockets lead to, and their endpoints; stored as `forwarded.json` in the directory of the
    sockets."""

    target: str  # the URL of the run
    endpoints: Endpoints  # of the local sockets; with the hub's public key if the hub needs a key


def is_ssh(run: str | None) -> bool:
    return run is not None and run.startswith(SCHEME)


def write_forwarded(directory: Path, forwarded: Forwarded) -> None:
    (directory / FILE).write_bytes(msgspec.json.encode(forwarded))


def forwarded_endpoints(target: str) -> Endpoints | None:
    """The local ends of the ssh tunnel to the run with the URL `target`; None if this process has no tunnel to that
    run."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return None
    try:
        found = msgspec.json.decode(read_ordinary(Path(directory) / FILE, FILE_BYTES), type=Forwarded)
    except (OSError, RunError, msgspec.DecodeError):
        return None
    return found.endpoints if found.target == target else None
