"""Textual driver that exits the cockpit when its terminal is closed, and resumes after every kind of suspension.

If the terminal is closed (a lost SSH connection, a killed tmux), every write fails. In plain Textual, the first failed
write ends the writer thread. The writer's queue then fills, so the main thread blocks when it next puts output into
the queue, and does not handle SIGHUP.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from textual.drivers.linux_driver import LinuxDriver


class LosableFile:
    """A text file that calls `on_lost` at the first failed write, and ignores all later writes."""

    def __init__(self, file: IO[str], on_lost: Callable[[], None]) -> None:
        self._file, self._on_lost = file, on_lost
        self._lost = False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._file.flush)

    def fileno(self) -> int:
        return self._file.fileno()

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._lost:
            return
        try:
            action()
        except (OSError, ValueError):  # the terminal or its file is closed
            self._lost = True
            self._on_lost()


class TerminalDriver(LinuxDriver):
    """Textual's driver, extended to exit the application when the terminal is closed and to resume it after every
    SIGCONT."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file: Any = LosableFile(self._file, self._on_lost)

    def start_application_mode(self) -> None:
        """Start reading keys and drawing. Called when the application starts and after each suspension."""
        self.exit_event.clear()  # it is set by `close`, and would end the input thread immediately
        super().start_application_mode()  # type: ignore[no-untyped-call]

    def _sigtstp_application(self, *_: Any) -> None:
        """Suspend after SIGTSTP, in the event loop. Textual's own method suspends the app in the signal handler, which
        can deadlock: if the handler interrupts the main thread while this thread holds the lock of the writer's queue,
        the handler waits for the lock forever."""
        self._in_event_loop(super()._sigtstp_application)

    def _sigcont_application(self, *_: Any) -> None:
        """Resume after SIGCONT, in the event loop."""
        self._in_event_loop(self._resume)

    def _in_event_loop(self, work: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, because the application has ended
            self._loop.call_soon_threadsafe(work)

    def _resume(self) -> None:
        """Resume drawing and reading keys. SIGCONT may arrive although the driver did not suspend itself: SIGSTOP stops
        the process without calling a handler, and SIGCONT can also be sent to a running process. Textual would then
        start a second input thread, which would take keys from the first thread and prevent the process from
        exiting."""
        if self._auto_restart and not self._must_signal_resume:
            if self._writer_thread is None:
                return
            if _in_background(self.fileno):
                # Suspended until the shell brings this process to the foreground.
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            self.suspend_application_mode()
            self._must_signal_resume = True
        super()._sigcont_application()

    def close(self) -> None:
        """End the input thread and close the driver. After an application error the input thread is still reading; if
        the terminal is gone as well, the input thread would otherwise run forever and keep the process alive."""
        self.exit_event.set()
        super().close()

    def _on_lost(self) -> None:
        """Exit the application. Called by the writer thread."""
        self._loop.call_soon_threadsafe(self._app.exit)


def _in_background(terminal: int) -> bool:
    """Whether another process group is in the foreground of the terminal; False without job control."""
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:
        return False
