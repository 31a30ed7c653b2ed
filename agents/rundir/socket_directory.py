"""The private directory that holds the Unix sockets of one hub."""

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path

from agents.protocol.base import RunError
from agents.transport.addresses import Endpoints

SOCKETS = ("ranks", "clients", "viewers")  # file names, and fields of `Endpoints`
ANSWER_S = 1.0  # how long to wait for a connection; a hub that is suspended still accepts them
LONGEST_SOCKET_PATH = 107  # bytes; sun_path holds 108 including the terminating zero


def endpoints_in(directory: Path) -> Endpoints:
    """The endpoints of a hub whose sockets are in `directory`; raises RunError if the path is too long for a socket."""
    for name in SOCKETS:
        length = len(os.fsencode(directory / name))
        if length > LONGEST_SOCKET_PATH:
            raise RunError(
                f"the socket path {directory / name} has {length} bytes, but the limit is "
                f"{LONGEST_SOCKET_PATH}; name a shorter directory, or set XDG_RUNTIME_DIR to one"
            )
    return Endpoints(**{name: f"ipc://{directory / name}" for name in SOCKETS})


def make_socket_directory() -> Path:
    """Create a private directory (mode 0700) with a short path.

    The path does not come from platformdirs, because without ``XDG_RUNTIME_DIR`` platformdirs returns
    ``/run/user/UID``, which is removed when the user logs out.
    """
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


def check_socket_directory(directory: Path, create: bool = True) -> None:
    """Raise RunError unless only this user has access to `directory`, because anyone with access can connect to the
    hub.

    `create`: make the directory if it does not exist.
    """
    try:
        if create:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise RunError(f"the socket directory {directory} cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RunError(f"the socket directory {directory} must be a directory of yours with mode 0700")


def socket_answers(path: Path) -> bool:
    """Whether a process listens on the Unix socket `path`. Two machines or containers may use the same path for
    different sockets, or not share the path at all; only a connection shows that the socket is reached. The directory
    must belong to this user, because another user's process could accept the connection.
    """
    try:
        check_socket_directory(path.parent, create=False)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(ANSWER_S)
            probe.connect(os.fspath(path))
    except (OSError, RunError, ValueError):
        return False
    return True


def remove_sockets(endpoints: Endpoints) -> None:
    """Remove a hub's sockets, and then their directory if it is empty."""
    for path in endpoints.paths:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        endpoints.directory.rmdir()
