"""Times of the phases of a step. The time of a nested phase, such as the backward pass in an optimizer's closure, is
not counted in the enclosing phase. So the phases of a step never add up to more than the step time.
"""

import threading
import time

COMMUNICATION = "collectives"  # phase: the time for which the program waits for collectives


class Phases:
    """The times of the phases (such as forward and backward) of the step in progress, in the training thread. Calls
    from other threads do nothing."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._open: list[str] = []
        self._since = 0.0
        self._s: dict[str, float] = {}

    @property
    def ours(self) -> bool:
        """Whether the current thread is the training thread."""
        return threading.get_ident() == self.thread

    def begin_thread(self) -> None:
        """Make the current thread the training thread."""
        self.thread = threading.get_ident()

    @property
    def current(self) -> tuple[str, float]:
        """The innermost open phase, or "" if none is open, and the time at which the phase last changed
        (`time.perf_counter`, which is `time.monotonic` on Linux). Other threads may read this property."""
        opened = self._open[-1:]  # one operation, because the training thread may change the list
        return opened[0] if opened else "", self._since

    def enter(self, name: str) -> None:
        """Begin a phase; the enclosing phase pauses."""
        if not self.ours:
            return
        now = time.perf_counter()
        self._count(now)
        self._open.append(name)

    def leave(self, name: str) -> None:
        """End the phase `name`, and nested phases that an exception left open. Does nothing if that phase is
        not open.
        """
        if name not in self._open or not self.ours:
            return
        self._count(time.perf_counter())
        while self._open.pop() != name:
            pass

    def within(self, name: str) -> bool:
        """Whether the phase `name` is open."""
        return name in self._open

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move `seconds` from the phase `source` to the phase `target`."""
        seconds = min(seconds, self._s.get(source, 0.0))
        self._s[source] = self._s.get(source, 0.0) - seconds
        self._s[target] = self._s.get(target, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The time of each phase in ms since the last call, for the step that is ending."""
        self._count(time.perf_counter())
        taken, self._s = self._s, {}
        return {name: 1e3 * seconds for name, seconds in taken.items()}

    def _count(self, now: float) -> None:
        if self._open:
            self._s[self._open[-1]] = self._s.get(self._open[-1], 0.0) + now - self._since
        self._since = now
