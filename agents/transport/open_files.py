"""Files: how many, and so connections, a process may have open; and lock files."""

import errno
import os
import resource
import stat
from pathlib import Path
from typing import BinaryIO

FILES = 65_536  # one a connection


def raise_file_limit() -> None:
    """As many as the system lets us, up to what we can use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_lock(path: Path) -> BinaryIO:
    """A file to lock, made if it is not there. Nothing is written to it, and no link is followed: where it lies, others
    may have put one. OSError: it is a link, or no file."""
    try:
        descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
    except OSError as error:
        raise OSError(
            error.errno, f"{path.name} is a link" if path.is_symlink() else error.strerror
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is no file")
    return os.fdopen(descriptor, "rb+", buffering=0)
