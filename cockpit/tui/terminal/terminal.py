"""Textual driver that exits the cockpit when its terminal is closed, instead of blocking.

If the terminal is closed (a lost SSH connection, a killed tmux), every write fails. Textual's writer thread ends at the
first failure. Its queue then fills, and the main thread blocks on the full queue and does not handle SIGHUP.
"""

from collections.abc import Callable
from typing import IO, Any

from textual.drivers.linux_driver import LinuxDriver


class LosableFile:
    """A text file that calls `on_lost` at the first failed write and drops this write and all later ones."""

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
    """Textual's driver, which exits the application when the terminal is closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file: Any = LosableFile(self._file, self._on_lost)

    def close(self) -> None:
        """Close the terminal. If the application ended by an error, its input thread still reads: at the end of a lost
        terminal it would run forever and keep the process."""
        self.exit_event.set()
        super().close()

    def _on_lost(self) -> None:
        """Exit the application. The writer thread calls this."""
        self._loop.call_soon_threadsafe(self._app.exit)
