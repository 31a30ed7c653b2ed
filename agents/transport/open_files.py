"""Raises the limit on open files, which also limits the connections of a process, and opens lock files."""

import errno
import os
import resource
import stat
from pathlib import Path
from typing import BinaryIO

FILES = 65_536  # each connection takes one descriptor


def raise_file_limit() -> None:
    """Raise the limit on open files to `FILES`, or to the maximum that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_lock(path: Path) -> BinaryIO:
    """Open a file for locking, and create it if needed. This function does not write to the file. A symbolic link is
    not followed, because another user may have placed it. Raises OSError if `path` is a link or not a regular file."""
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
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb+", buffering=0)
