"""Prints a command's output."""

import signal
import sys

from agents.rundir.standard_streams import discard_output, output_failure

FAILED = 1  # exit status if standard output cannot be written


def print_text(text: str) -> None:
    """Write `text` to standard output. If the reader of the pipe has exited, exit without an error message. If the
    output cannot be written, print one sentence on stderr and exit with status 1.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # such as `engine reference | head`
        discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        why = output_failure(error)
        if why is None:
            raise
        discard_output()
        sys.stderr.write(f"{why}\n")
        raise SystemExit(FAILED) from None
