"""Locks a run's folder and its checkpoints folder, so that two runs never write to the same folder. Torch-free."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agents.rundir.runs import RunError
from agents.transport.open_files import open_lock

LOCK = ".lock"  # the file's content names the process that holds the lock
MOST_BYTES = 300
WAIT_S = 3.0  # how long to wait for the lock, because a killed run takes a moment to release it


@contextmanager
def lock_folder(
    folder: Path, wait_s: float = WAIT_S, warn: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Lock the folder for this run; create it if it does not exist. Raises RunError if the folder cannot be created or
    locked.

    Forked processes inherit the lock. The kernel releases the lock when the last process of the run ends, even if that
    process is killed. `warn` is called with a message if the file system does not support locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_lock(folder / LOCK)
    except OSError as error:
        raise RunError(f"cannot save in {folder}: {error.strerror}") from None
    with lock:
        end = time.monotonic() + wait_s
        while not _locked(lock.fileno(), folder, warn):
            if time.monotonic() >= end:
                holder = lock.read(MOST_BYTES).decode(errors="replace").strip() or "another process"
                raise RunError(
                    f"{folder} is in use by {holder}, whose run has not ended; end it first, "
                    "or choose another folder with --run-dir"
                )
            time.sleep(0.05)
        with suppress(OSError):  # if the disk is full, the folder is locked without the holder's name
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


def _locked(descriptor: int, folder: Path, warn: Callable[[str], None]) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        warn(
            f"the file system of {folder} has no locks ({error.strerror}), so make sure that no other run uses it"
        )
    return True
