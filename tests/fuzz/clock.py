"""A fake clock that advances only when the fuzz input says so, so that waiting takes no real time and every failure is
reproducible.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


class Clock:
    """A fake of the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return 1_700_000_000.0 + self.now_s

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


@contextmanager
def scripted() -> Iterator[Clock]:
    """Context manager: in its body, every loaded module of `agents` and `cockpit` uses the fake clock."""
    clock = Clock()
    readers: list[ModuleType] = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("agents.", "cockpit.")) and getattr(module, "time", None) is time
    ]
    for module in readers:
        module.time = clock  # type: ignore[attr-defined]
    try:
        yield clock
    finally:
        for module in readers:
            module.time = time  # type: ignore[attr-defined]
