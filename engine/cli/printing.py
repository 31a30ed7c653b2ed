"""Prints a command's output."""

import signal
import sys

from agents.rundir.standard_streams import discard_output


def print_text(text: str) -> None:
    """Write `text` to standard output. If the reader of the pipe has exited, exit without an error message."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # such as `engine reference | head`
        discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
