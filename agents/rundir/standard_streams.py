"""Makes the standard streams safe to use: they may be closed, have a different encoding, or be redirected to a full
disk."""

import errno
import io
import os
import sys
from contextlib import suppress

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def open_streams() -> None:
    """Replace a closed stdin, stdout or stderr (``>&-``) with the null device. If the stream stayed closed, the next
    opened file would get the descriptor of that stream.
    """
    for descriptor, name, flags in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is `descriptor`
            setattr(sys, name, open(null, flags, encoding="utf-8", closefd=False))  # noqa: SIM115


def fit_output(as_json: bool) -> None:
    """If `as_json` is set, make stdout use UTF-8. Otherwise, stdout keeps its encoding and writes ``?`` in place of
    characters that it cannot encode.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        if as_json:
            sys.stdout.reconfigure(encoding="utf-8", errors="strict")
        else:
            sys.stdout.reconfigure(errors="replace")


def output_failure(error: OSError) -> str | None:
    """The message to print if `error` means that writing to standard output failed; None for other errors."""
    if error.filename is None and error.errno in FULL:
        return f"standard output cannot be written: {error.strerror}"
    return None


def discard_output() -> None:
    """Discard buffered output, so that the interpreter reports no write error at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
