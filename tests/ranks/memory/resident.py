"""The resident memory of this process, as reported by the kernel."""

from pathlib import Path

MIB = 2**20


class Resident:
    """The peak resident memory of the process in bytes, minus its resident memory when this object was created.

    Resident memory includes more than tensors: modules, the corpus, and memory that the allocator holds but no tensor
    uses.
    """

    def __init__(self) -> None:
        self._start = _read("VmRSS")

    @property
    def peak(self) -> int:
        return _read("VmHWM") - self._start


def _read(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
