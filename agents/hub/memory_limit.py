"""How much memory a hub holds, and the limit at which it starts again.

libzmq limits the size of a part (`MAXMSGSIZE`) and counts whole messages (`RCVHWM`), but not the parts of one message:
it holds them all until the last has come, before anybody can look at the first. So only the memory of the whole
process bounds what a peer can make a hub hold.
"""

import mmap
import os
from pathlib import Path
from typing import Final

MEMORY_MB: Final = 1024  # 16,384 ranks that connect directly take some 600
LEAST_MB: Final = 64  # an idle hub has about 30


class MemoryLimit:
    """The resident memory of this process, and the most it may have. Without /proc there is no limit."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._statm: int | None = None
        if Path("/proc/self/statm").exists():
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def excess(self) -> str:
        """One sentence when the limit is passed, else nothing; a few microseconds."""
        if self._statm is None:
            return ""
        held = int(os.pread(self._statm, 128, 0).split()[1]) * mmap.PAGESIZE
        if held <= self._most:
            return ""
        return (
            f"this hub holds {held >> 20} MiB of memory, more than its limit of {self._most >> 20} "
            "(--memory-mb): it starts again from its journal"
        )

    def close(self) -> None:
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None
