"""The memory limit above which a hub restarts itself.

libzmq limits the size of a message part (`MAXMSGSIZE`) and the number of queued messages (`RCVHWM`), but not the number
of parts of a message: libzmq buffers all parts until the last part arrives. Only a limit on the resident memory of the
whole process bounds what a peer can make a hub allocate.
"""

import mmap
import os
from pathlib import Path
from typing import Final

MEMORY_MB: Final = 1024  # in MiB; a hub with 16,384 directly connected ranks takes about 600 MiB
LEAST_MB: Final = 64  # in MiB; an idle hub takes about 30 MiB


class MemoryLimit:
    """Compares the resident memory of this process with a limit. Without /proc there is no limit.

    The file in /proc stays open. psutil would open it for each reading, which fails if the process has no free file
    descriptor.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._statm: int | None = None
        if Path("/proc/self/statm").exists():
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def excess(self) -> str:
        """A one-sentence message if the limit is exceeded, else "". A call takes a few microseconds."""
        if self._statm is None:
            return ""
        held = int(os.pread(self._statm, 128, 0).split()[1]) * mmap.PAGESIZE
        if held <= self._most:
            return ""
        return (
            f"this hub holds {held >> 20} MiB of memory, more than its limit of {self._most >> 20} "
            "(--memory-mb): it restarts from its journal"
        )

    def close(self) -> None:
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None
