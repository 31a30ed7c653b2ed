"""This machine: its name and its identity, and the state of its processes.

A host name does not identify a machine, because two machines may have the same name; a process id does not identify a
process, because another machine, another container and a later process may have the same id.
"""

import contextlib
import functools
import hashlib
import os
import socket
import uuid
from pathlib import Path
from typing import Final, Literal, NamedTuple

import psutil

_PROCESS_STATES: Final[dict[str, Literal["ended", "stopped"]]] = {
    psutil.STATUS_ZOMBIE: "ended",  # a signal to a zombie succeeds, so the state must be checked
    psutil.STATUS_DEAD: "ended",
    psutil.STATUS_STOPPED: "stopped",
}


def this_host() -> str:
    """The name of this machine, which is shown to people. Another machine may have the same name."""
    return socket.gethostname()


class Machine(NamedTuple):
    """The identity of a machine, and of the process ids that a process on it sees."""

    installation: str  # of its operating system; the same after a restart of the machine
    boot: str  # differs after a restart; the same in all containers of the machine
    processes: str  # the namespace of process ids; differs in containers

    @classmethod
    def parse(cls, text: str) -> "Machine":
        """The parts of a `this_machine`; empty ones if `text` is "" or another text."""
        parts = text.split(".")
        return cls(*parts) if len(parts) == len(cls._fields) else cls("", "", "")

    @property
    def kernel(self) -> tuple[str, str]:
        """The part that all containers of a machine share."""
        return self.installation, self.boot


def this_machine() -> str:
    """The identity of this machine (`Machine`) as text. Two processes with the same identity can check each other's
    process ids."""
    return ".".join((*_kernel(), _namespace("pid")))


def this_file_system() -> str:
    """The identity of this machine and of the file systems that this process sees. Two processes with the same identity
    can connect to each other's Unix sockets."""
    return f"{this_machine()}.{_namespace('mnt')}"


@functools.cache
def _kernel() -> tuple[str, str]:
    installation, boot = _content("/etc/machine-id"), _content("/proc/sys/kernel/random/boot_id")
    if not boot:  # not Linux
        address = uuid.getnode()  # the address of a network device; a random number has this bit set
        installation = socket.gethostname() + ("" if address >> 40 & 1 else f"{address:x}")
    return _digest(installation), _digest(boot)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest() if text else ""


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    """The number of this process's namespace, such as ``4026531836``; "" if the system has no namespaces."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}").rpartition("[")[2].rstrip("]")
    except OSError:
        return ""


def process_start(pid: int) -> int:
    """When a process of this machine started, in clock ticks since the machine started. With the machine and the
    process id, this identifies the process. 0 if the system does not tell.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[19])  # field 22 of proc(5); the name of the command may contain spaces
    except (OSError, ValueError, IndexError):
        return 0


def process_state(pid: int, start: int = 0) -> Literal["ended", "stopped", "alive"]:
    """Whether a process of this machine has ended, is stopped, or is alive. `start`: its `process_start` (0: unknown);
    a process with another start has got the id of an ended process.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return "ended"
    except PermissionError:
        pass
    if start and process_start(pid) not in (0, start):
        return "ended"
    with contextlib.suppress(psutil.Error, ValueError):  # hidden from this user, or `pid` is not positive
        return _PROCESS_STATES.get(psutil.Process(pid).status(), "alive")
    return "alive"
