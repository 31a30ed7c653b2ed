"""Opens the files of a run's folder for writing. Another user may have put a link or a pipe in their place.

A link is not followed, because the write would change the file it points to; a pipe is refused, because opening it, or
a write to it, could block.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

_SAFE = os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def descriptor_of(path: Path, flags: int) -> int:
    """Open a file with `flags`, and create it if needed. Raises OSError, with the reason in `strerror`, if `path` is a
    link or not a regular file."""
    try:
        descriptor = os.open(path, _SAFE | flags, 0o666)
    except OSError as error:
        raise OSError(error.errno, _odd(path) or error.strerror, str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISCHR(mode):  # only root can have made a device
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file", str(path))
    return descriptor


def open_to_append(path: Path, truncate: bool = False) -> FileIO:
    """Open a file, unbuffered; each write goes to the end of the file. Raises OSError as `descriptor_of` does."""
    descriptor = descriptor_of(path, os.O_WRONLY | os.O_APPEND | (os.O_TRUNC if truncate else 0))
    return open(descriptor, "ab", buffering=0)


def open_lock(path: Path) -> FileIO:
    """Open a file for locking. This function does not write to the file. Raises OSError as `descriptor_of` does."""
    return open(descriptor_of(path, os.O_RDWR), "rb+", buffering=0)


def append_text(path: Path, text: str) -> None:
    """Append `text` in UTF-8. Raises OSError as `open_to_append` does."""
    with open_to_append(path) as file:
        left = memoryview(text.encode(errors="backslashreplace"))
        while left:
            left = left[file.write(left) or 0 :]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new, empty file beside `path`, which replaces `path` when the block ends without an error. So
    a reader never sees a part of the file, and if `path` is a link, the link is replaced. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        os.close(descriptor_of(unfinished, os.O_WRONLY | os.O_EXCL))
        yield unfinished
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file, as with `replacing`. Raises OSError."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


def check_writable(*paths: Path) -> None:
    """Raise OSError if a path exists and is a link or not a regular file. Call this function before a library opens the
    paths for writing."""
    for path in paths:
        if why := _odd(path):
            raise OSError(errno.EINVAL, why, str(path))


def _odd(path: Path) -> str:
    """Why the file at `path` is not used; "" if it is a regular file or does not exist."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return ""
    if stat.S_ISREG(mode):
        return ""
    return f"{path.name} is {'a link' if stat.S_ISLNK(mode) else 'not a regular file'}"
