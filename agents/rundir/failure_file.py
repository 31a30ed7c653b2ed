"""`failure.txt` in a run's folder: why the run failed, as its launcher recorded it."""

import contextlib
import os
import re
import time
from pathlib import Path

from agents.rundir.bounded_read import open_ordinary
from agents.transport.open_files import append_text

# The launcher writes one line with date, time and cause, followed by the reports of the ranks.
FAILURE_FILE = "failure.txt"
FAILURE_BYTES = 64 << 20  # bytes read from the end of the file: enough for the reports of a thousand ranks
STARTED_AGAIN = "the run was started again"  # written as a line after the cause of an earlier failure
_FAILURE_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.+)")


def last_failure(folder: Path, since_s: float = 0.0) -> str | None:
    """Why the run failed, in one sentence; None if no failure was recorded after `since_s`, or if the run was restarted
    after the failure.
    """
    path = folder / FAILURE_FILE
    try:
        if path.stat().st_mtime < since_s:
            return None
        with open_ordinary(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - FAILURE_BYTES))
            lines = file.read(FAILURE_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    causes = [match[1] for line in lines if (match := _FAILURE_LINE.fullmatch(line))]
    return causes[-1] if causes and causes[-1] != STARTED_AGAIN else None


def forget_failure(folder: Path) -> None:
    """Record that the run has restarted, so that an earlier failure is not reported as the cause when the run ends
    later.

    Earlier failure reports are not deleted from the file.
    """
    if last_failure(folder):
        with contextlib.suppress(OSError):
            append_text(folder / FAILURE_FILE, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {STARTED_AGAIN}\n")
