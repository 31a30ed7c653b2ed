"""This machine: its host name, and the state of its processes."""

import contextlib
import os
import socket
from typing import Final, Literal

import psutil

_PROCESS_STATES: Final[dict[str, Literal["ended", "stopped"]]] = {
    psutil.STATUS_ZOMBIE: "ended",  # a signal to a zombie succeeds, so the state must be checked
    psutil.STATUS_DEAD: "ended",
    psutil.STATUS_STOPPED: "stopped",
}


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
    with contextlib.suppress(psutil.Error, ValueError):  # hidden from this user, or `pid` is not positive
        return _PROCESS_STATES.get(psutil.Process(pid).status(), "alive")
    return "alive"
