"""The engine process of a run that the cockpit started. The engine ends when the cockpit exits or is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from agents.rundir.bounded_read import open_ordinary
from agents.transport.open_files import open_to_append

GRACE_S = 15.0
LOG = "engine.log"
TAIL_BYTES = 64 << 10


class EngineProcess:
    """The process of ``engine run``, or of another `command` of the engine, in its own session, so that Ctrl-C reaches
    only the cockpit."""

    def __init__(self, layout: Path, arguments: Sequence[str], folder: Path, command: str = "run") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / LOG
        words = [sys.executable, "-m", "engine", command, str(layout), *arguments, "--run-dir", str(folder)]
        words.append("--end-with-parent")  # the engine then also ends if the cockpit is killed
        with open_to_append(self.log, truncate=True) as output:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The exit status of the engine; None while it runs."""
        return self._process.poll()

    def last_lines(self, count: int) -> list[str]:
        """The last lines that the engine printed."""
        with contextlib.suppress(OSError), open_ordinary(self.log) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            return [line for line in log.read().decode(errors="replace").splitlines() if line.strip()][
                -count:
            ]
        return []

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Terminate the engine, wait, and kill all remaining processes of its session. Ctrl-C skips the wait."""
        try:
            if self.exit_status is None:
                self._process.terminate()
                deadline = time.monotonic() + grace_s
                while self.exit_status is None and time.monotonic() < deadline:
                    time.sleep(0.05)
        except KeyboardInterrupt:
            pass
        finally:
            # Kill the other processes of the session too, such as a rank whose launcher was killed.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
