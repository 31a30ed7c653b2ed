"""The standard streams of a command, whatever it was started with: closed, of another encoding, on a full disk."""

import errno
import io
import os
import sys
from contextlib import suppress

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def open_streams() -> None:
    """Give a closed stdin, stdout or stderr (``>&-``) the null device; the next file opened would take its place."""
    for descriptor, name, flags in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, so it is `descriptor`
            setattr(sys, name, open(null, flags, encoding="utf-8", closefd=False))  # noqa: SIM115


def fit_output(as_json: bool) -> None:
    """JSON is UTF-8; text is in the terminal's encoding, with ``?`` for what that has not."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        if as_json:
            sys.stdout.reconfigure(encoding="utf-8", errors="strict")
        else:
            sys.stdout.reconfigure(errors="replace")


def output_failure(error: OSError) -> str | None:
    """One sentence, if `error` is of a stream that takes no more; an error of a file has the file's name."""
    if error.filename is None and error.errno in FULL:
        return f"standard output cannot be written: {error.strerror}"
    return None


def discard_output() -> None:
    """What standard output still holds goes nowhere, so that the interpreter does not complain of it at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
