"""Pipeline timelines of past steps: the newest, those of the slowest steps, and some others, spread evenly."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from agents.protocol import Timeline
from cockpit.data.history.kept_steps import KeptSteps

STEPS = 64
NEWEST = 24
SLOWEST = 8
# Maximum number of bytes of all timelines; an encoded action takes about 25 bytes, an object seven times more.
BYTES = 24 << 20


@dataclass
class _Kept:
    """The timelines of one step, encoded with msgpack to save memory. Few of them are ever displayed and decoded."""

    encoded: dict[int, bytes]  # by rank
    window_ms: float


class Timelines:
    """Keeps the timelines of all ranks for a limited number of steps. `time_of(step)`: the step time in ms, None if
    unknown."""

    def __init__(self, time_of: Callable[[int], float | None]) -> None:
        self._time_of = time_of
        self._kept: KeptSteps[_Kept] = KeptSteps(self._time, STEPS, NEWEST, SLOWEST, BYTES)
        self._decoded: tuple[int, dict[int, Timeline]] | None = None  # the step that was read last
        self.revision = 0  # increases with each change
        self._newest: dict[int, int] = {}  # the newest step with a timeline, by rank

    def copy(self, time_of: Callable[[int], float | None]) -> "Timelines":
        """A copy that does not change when timelines are added to the original."""
        still = Timelines(time_of)
        still._kept = self._kept.copy(still._time)
        for step in still._kept:
            kept = still._kept.get(step)
            if kept:
                still._kept.add(step, _Kept(kept.encoded.copy(), kept.window_ms), _size(kept))
        still._newest, still.revision = self._newest.copy(), self.revision
        return still

    def note(self, timeline: Timeline) -> None:
        """Keep a timeline. A step earlier than the rank's newest step means that the run was resumed; later timelines
        are then removed.
        """
        if timeline.step < self._newest.get(timeline.rank, -1):
            self.cut(timeline.step)
        self._newest[timeline.rank] = timeline.step
        self.revision += 1
        if self._decoded and self._decoded[0] == timeline.step:
            self._decoded = None
        kept = self._kept.get(timeline.step) or _Kept({}, 0.0)
        kept.encoded[timeline.rank] = msgspec.msgpack.encode(timeline)
        kept.window_ms = max(kept.window_ms, timeline.window_ms)
        self._kept.add(timeline.step, kept, _size(kept))

    def cut(self, step: int) -> None:
        """Remove `step` and all later steps."""
        self._kept.cut(step)
        self._decoded = None
        self.revision += 1
        self._newest = {rank: newest for rank, newest in self._newest.items() if newest < step}

    @property
    def steps(self) -> list[int]:
        """The steps whose timelines are kept, ascending."""
        return self._kept.steps

    @property
    def dropped(self) -> int:
        """Number of steps whose timelines were dropped to make room."""
        return self._kept.dropped

    def at(self, step: int | None) -> dict[int, Timeline]:
        """The timelines of a step by rank; empty if the step is not kept."""
        kept = self._kept.get(step)
        if kept is None or step is None:
            return {}
        if self._decoded is None or self._decoded[0] != step:
            found = {
                rank: msgspec.msgpack.decode(kept.encoded[rank], type=Timeline)
                for rank in sorted(kept.encoded)
            }
            self._decoded = (step, found)
        return self._decoded[1]

    def _time(self, step: int) -> float:
        known = self._time_of(step)
        if known is not None:
            return known
        kept = self._kept.get(step)
        return kept.window_ms if kept else 0.0


def _size(kept: _Kept) -> int:
    return sum(map(len, kept.encoded.values()))
