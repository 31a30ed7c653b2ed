"""Reads files that another user may have written; refuses a path that is not a regular file, or a file that is too
large."""

import os
import stat
from io import FileIO
from pathlib import Path


def open_ordinary(path: Path, links: bool = True) -> FileIO:
    """The file at `path`, unbuffered; raises OSError, with the reason in `strerror`, if it is not a regular file.

    Opening a pipe would block until it has a writer, and a device may have no end of file. `links`: whether to follow a
    symbolic link.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except ValueError:  # the path contains a NUL character
        raise OSError(0, "not a legal file name", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file", str(path))
    return open(descriptor, "rb", buffering=0)


def check_ordinary(*paths: Path) -> None:
    """Raise OSError if a path exists and is not a regular file. Call this function before a library opens the paths."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode):
            raise OSError(0, "not a regular file", str(path))


def read_ordinary(path: Path, most: int, links: bool = True) -> bytes:
    """Read the whole file. `most`: maximum size in bytes. Raises OSError if the file is larger or is not a regular
    file."""
    with open_ordinary(path, links) as file:
        size = os.fstat(file.fileno()).st_size
        content = bytearray()
        while len(content) <= most and (chunk := file.read(min(size, most) + 1)):
            content += chunk
    if len(content) > most:
        raise OSError(0, f"larger than {most:,} bytes", str(path))
    return bytes(content)
