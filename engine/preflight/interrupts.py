"""Ctrl-C for commands: the first one ends the command, and further ones do not interrupt its clean-up.

Every Ctrl-C raises KeyboardInterrupt by default, so a second one would end the clean-up after the first, or the exit of
the interpreter, with a traceback. Like `engine.preflight.package`, this module imports no module of this project.
"""

import atexit
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # exit status: 128 + SIGINT
PATIENCE_S = 3.0  # a Ctrl-C this long after the first one ends a clean-up that hangs


class Interrupts:
    """The handler of SIGINT for a command. `ends_s`: when the first Ctrl-C came, or when the command ended; None:
    neither."""

    def __init__(self) -> None:
        self.ends_s: float | None = None
        self.interrupted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.ends_s is None:
            self.ends_s, self.interrupted = now, True
            raise KeyboardInterrupt
        if now - self.ends_s > PATIENCE_S:
            os._exit(INTERRUPTED)


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Context manager in which the first Ctrl-C raises KeyboardInterrupt. After it, no Ctrl-C does. Does nothing if
    SIGINT is ignored, as in a background job."""
    former = signal.getsignal(signal.SIGINT)
    if former is not signal.default_int_handler and not isinstance(former, Interrupts):
        yield
        return
    handler = Interrupts()
    signal.signal(signal.SIGINT, handler)
    # The interpreter would restore the default action late in its exit, and a Ctrl-C would then kill it.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    except RuntimeError:
        # In a condition variable's wait, KeyboardInterrupt can leave the lock released: "release unlocked lock".
        if handler.interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        if handler.ends_s is None:
            handler.ends_s = time.monotonic()
