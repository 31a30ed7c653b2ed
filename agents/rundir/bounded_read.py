"""Reading files that somebody else may have put there: ordinary ones, of a bounded size."""

import os
import stat
from io import FileIO
from pathlib import Path


def open_ordinary(path: Path, links: bool = True) -> FileIO:
    """The file at `path`, unbuffered; OSError, with its reason in `strerror`, for whatever is no ordinary file.

    To open a pipe waits for its writer, and a device may never end. `links` says whether a symbolic link is followed.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except ValueError:  # a NUL in the name
        raise OSError(0, "no file can have this name", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not an ordinary file", str(path))
    return open(descriptor, "rb", buffering=0)


def check_ordinary(*paths: Path) -> None:
    """OSError if something lies there that is no ordinary file, for a library that opens files by itself."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode):
            raise OSError(0, "not an ordinary file", str(path))


def read_ordinary(path: Path, most: int, links: bool = True) -> bytes:
    """All of it; OSError also where it has more than `most` bytes."""
    with open_ordinary(path, links) as file:
        size = os.fstat(file.fileno()).st_size
        content = bytearray()
        while len(content) <= most and (chunk := file.read(min(size, most) + 1)):
            content += chunk
    if len(content) > most:
        raise OSError(0, f"larger than {most:,} bytes", str(path))
    return bytes(content)
