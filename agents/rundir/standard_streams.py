"""Makes the standard streams safe to use: they may be closed, have another encoding, or be on a full disk."""

import errno
import io
import os
import sys
from contextlib import suppress

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def open_streams() -> None:
    """Open the null device for a closed stdin, stdout or stderr (``>&-``), or the next file opened becomes it."""
    for descriptor, name, flags in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # open takes the lowest free one, which is `descriptor`
            setattr(sys, name, open(null, flags, encoding="utf-8", closefd=False))  # noqa: SIM115


def fit_output(as_json: bool) -> None:
    """Set the encoding: UTF-8 for JSON; for text the terminal's, with ``?`` for characters it lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        if as_json:
            sys.stdout.reconfigure(encoding="utf-8", errors="strict")
        else:
            sys.stdout.reconfigure(errors="replace")


def output_failure(error: OSError) -> str | None:
    """One sentence if standard output cannot be written, else None; errors of files carry a file name."""
    if error.filename is None and error.errno in FULL:
        return f"standard output cannot be written: {error.strerror}"
    return None


def discard_output() -> None:
    """Discard buffered output, so that the interpreter reports no error at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
