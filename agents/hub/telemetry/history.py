"""What hubs before this one knew of the run, told anew: its curve and its events. (Commands and trials come from the
journal; what is wrong with the run is found anew.)

It is read from the recording by a thread, so that no hub waits for a disk, and told when it is clear what of it
belongs to the run that is there: all of it, if the leader is still the same process; of another process's, once the
first step has been summarised, what is older than that step. So a run that goes on from a snapshot goes on with its
curve, and one that begins anew in the same folder begins a new one.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as List
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Event, Hello, Message, Recalled, Summary, WireError, clip, codec
from agents.recording.endings import Ending, endings
from agents.recording.format import NothingRecordedError, RecordingError
from agents.state.curve import Curve

MESSAGE_BYTES = 32 << 10  # told at once: a watcher on a slow line takes it piece by piece
SAME_PROCESS_S = 1.0  # between two words of one process on when it began

M = TypeVar("M", bound=Message)


class History:
    """Reads at once; `tick` is the hub's, and tells."""

    def __init__(self, path: Path, update_log: UpdateLog) -> None:
        self._path, self._update_log = path, update_log
        self._found: list[Ending] = []
        self._problem = ""
        self._done = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, name="recall", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for ending in endings(self._path, self._update_log.epoch, self._stopping):
                self._found.append(ending)
        except NothingRecordedError:
            pass
        except RecordingError as error:
            self._problem = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it costs the past and not the hub
            self._problem = f"reading it had an error: {error!r}"

    def tick(self, leader: int | None) -> bool:
        """Tell what is found of the run that `leader` leads, once it is clear what that is; True: it is told now."""
        if self._done or self._thread.is_alive():
            return False
        if self._problem:
            text = f"what was known of the run before this hub started is lost: {self._problem}"
            self._update_log.publish(Event(time.time(), "warning", "hub", clip(text)))
            self._problem = ""
        state = self._update_log.state
        hello = state.hellos.get(leader) if leader is not None else None
        known = first_step(state.curve, state.summaries)
        restored = belonging(self._found, hello, known) if hello else None
        if self._found and restored is None:
            return False
        self._done, self._found = True, []
        if restored is None:
            return False
        for piece in _messages(restored):
            with contextlib.suppress(
                WireError
            ):  # one that is as large as a message may be: it has no room here
                self._update_log.publish(piece)
        return bool(restored.curve or restored.summaries or restored.events)

    def close(self) -> None:
        """Read no further."""
        self._stopping.set()
        self._thread.join(1.0)


@dataclass
class RestoredHistory:
    """What is known of the steps before some other, oldest first; `curve` is older than `summaries`."""

    curve: Curve = field(default_factory=Curve)
    summaries: list[Summary] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def put_before(self, curve: Curve, summaries: list[Summary], events: list[Event]) -> None:
        """Put what is older still in front."""
        if self.curve:
            self.curve.extend(summaries)
        else:
            self.summaries = summaries + self.summaries
        for part in curve.parts():
            self.curve.insert(part)
        newer = self.events[0].time_s if self.events else None
        self.events = [one for one in events if newer is None or one.time_s < newer] + self.events


def first_step(curve: Curve, summaries: List[Summary]) -> int | None:
    """The oldest step that is known."""
    return curve.first if curve else summaries[0].step if summaries else None


def belonging(found: List[Ending], leader: Hello, known: int | None) -> RestoredHistory | None:
    """Of the ends of hub starts, newest first, what belongs to the run that `leader` leads and of which everything
    from step `known` on is known; None as long as that cannot be told."""
    restored = RestoredHistory()
    for ending in found:
        if ending.leader.run != leader.run:
            break
        same = _same_process(ending.leader, leader)
        if not same and known is None:
            return None
        before = min(step for step in (known, leader.step + 1 if same else None) if step is not None)
        older = [one for one in ending.summaries if one.step < before]
        curve = copy(ending.curve)
        curve.cut(before)
        if not older and not curve and not same:
            break  # the run began anew, or all of this was told to the hub after it
        restored.put_before(curve, older, ending.events)
        first = first_step(restored.curve, restored.summaries)
        known = known if first is None else first
    return restored


def _same_process(one: Hello, other: Hello) -> bool:
    """Whether it is one process; it began when it says, by the hub's clock."""
    return (one.host, one.pid) == (other.host, other.pid) and abs(
        one.began_s - other.began_s
    ) < SAME_PROCESS_S


def _messages(restored: RestoredHistory) -> Iterator[Recalled]:
    """Newest first, for each goes in front of what is known."""
    yield from (Recalled(events=part) for part in _parts(restored.events))
    yield from (Recalled(summaries=part) for part in _parts(restored.summaries))
    yield from (Recalled(curve=[part]) for part in restored.curve.parts())


def _parts(messages: list[M]) -> Iterator[list[M]]:
    """Parts of about `MESSAGE_BYTES`, the last first."""
    part: list[M] = []
    size = 0
    for message in reversed(messages):
        try:
            size += len(codec.pack(message))
        except WireError:  # more than a message may be, whoever wrote that
            continue
        part.append(message)
        if size >= MESSAGE_BYTES:
            yield part[::-1]
            part, size = [], 0
    if part:
        yield part[::-1]
