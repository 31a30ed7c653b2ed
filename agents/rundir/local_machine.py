"""This machine: its host name, and the state of its processes."""

import contextlib
import os
import socket
from pathlib import Path
from typing import Final, Literal

_PROCESS_STATES: Final[dict[str, Literal["ended", "stopped"]]] = {"Z": "ended", "X": "ended", "T": "stopped"}


def this_host() -> str:
    """The name by which ranks and the hub identify this machine."""
    return socket.gethostname()


def process_state(pid: int) -> Literal["ended", "stopped", "alive"]:
    """Whether a process of this machine has ended, is stopped, or is alive."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return "ended"
    except PermissionError:
        return "alive"
    with contextlib.suppress(OSError, IndexError):
        # The field after the command's closing parenthesis. A zombie accepts signals although it has ended.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return _PROCESS_STATES.get(letter, "alive")
    return "alive"
