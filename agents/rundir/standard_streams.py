"""Makes the standard streams safe to use: they may be closed, have a different encoding, be redirected to a full disk,
or lead to a pipe that nobody reads."""

import errno
import io
import os
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PATIENCE_S = 2.0  # how long a message waits for the reader of its stream
PART = 1024  # characters written at once; a pipe that can be written accepts 4096 bytes
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


def say(text: str) -> None:
    """Write `text` to stderr unchanged. Write errors are ignored; what nobody reads within `PATIENCE_S` is lost."""
    with suppress(OSError, ValueError):
        for start in range(0, len(text), PART):
            if sys.stderr is None or not _accepts(sys.stderr):
                return
            sys.stderr.write(text[start : start + PART])
            sys.stderr.flush()


def _accepts(stream: Any) -> bool:
    """Whether the stream can be written without waiting, now or within `PATIENCE_S`."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return True  # a stream in memory
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(1000 * PATIENCE_S))


def patiently(work: Callable[[], object]) -> None:
    """Call `work`, which writes messages by means of the program, such as its logging handlers. If it waits longer
    than `PATIENCE_S`, it continues in a thread."""
    thread = threading.Thread(target=work, name="message", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
