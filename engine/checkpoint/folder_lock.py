"""Locks on a run's folder and on its folder of checkpoints, so that no two runs write to one folder. Torch-free."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agents.rundir.runs import RunError

LOCK = ".lock"  # its content names the process that holds the folder
WAIT_S = 3.0  # how long to wait for another run to release a folder: a killed run takes a moment to end


@contextmanager
def lock_folder(
    folder: Path, wait_s: float = WAIT_S, warn: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Lock the folder for this run, and make it if it does not exist. RunError, one sentence, if it cannot.

    The kernel releases the lock when the last process of the run ends, however it ends: forked processes hold the lock
    too. `warn` gets a sentence if this file system has no locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise RunError(f"nothing can be saved in {folder}: {error.strerror}") from None
    with lock:
        end = time.monotonic() + wait_s
        while not _locked(lock.fileno(), folder, warn):
            if time.monotonic() >= end:
                lock.seek(0)
                holder = lock.read().strip() or "another process"
                raise RunError(
                    f"{folder} is in use by {holder}, a run that is still alive; end it first, "
                    "or choose another folder with --run-dir"
                )
            time.sleep(0.05)
        with suppress(OSError):  # on a full disk the lock still holds
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
        yield


def _locked(descriptor: int, folder: Path, warn: Callable[[str], None]) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        warn(f"the file system of {folder} has no locks ({error.strerror}), so keep other runs off it")
    return True
