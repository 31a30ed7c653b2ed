"""The terminal as Textual's driver writes to it; one that is gone ends the cockpit instead of hanging it.

A closed terminal (a lost SSH connection, a killed tmux) fails every write. Textual's writer thread ends with the first
failure, its queue then fills, and the main thread waits for room in it without end, deaf to SIGHUP.
"""

from collections.abc import Callable
from typing import IO, Any

from textual.drivers.linux_driver import LinuxDriver


class LosableFile:
    """A text file whose first failed write calls `on_lost`; that write and all later ones are dropped."""

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
        except (OSError, ValueError):  # the terminal is gone, or its file is closed
            self._lost = True
            self._on_lost()


class TerminalDriver(LinuxDriver):
    """Textual's driver, which ends the application when the terminal is gone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file: Any = LosableFile(self._file, self._on_lost)

    def _on_lost(self) -> None:
        """Called by the writer thread."""
        self._loop.call_soon_threadsafe(self._app.exit)
