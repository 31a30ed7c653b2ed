"""Restores the history of a run after a hub restart: its metric curves (loss, step time and others by step) and its
events. (Commands and trials come from the journal; alerts are detected again.)

A thread reads the recording, so that the hub does not wait for the disk. The history is published once it is known
which part belongs to the current run. If the leader is the same process as before the restart, the whole history
belongs to the current run. If the leader is a new process, the hub waits for the first step summary, and then
publishes only the part of the history that is older than that step. A run that resumes from a checkpoint keeps its
metric curves; a new run in the same folder starts new ones.
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
from agents.state.metric_curves import Curve

# Maximum size of one update, so that a client on a slow connection receives the history in parts.
MESSAGE_BYTES = 32 << 10
SAME_PROCESS_S = 1.0  # maximum difference between two start times that the same process reports

M = TypeVar("M", bound=Message)


class History:
    """Reads the history in a thread that the constructor starts. The hub calls `tick`, which publishes the history."""

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
        except Exception as error:  # noqa: BLE001 - an error loses the history, but must not end the hub
            self._problem = f"internal error: {error!r}"

    def tick(self, leader: int | None) -> bool:
        """Publish the restored history once it is known which part of it belongs to the current run, whose leader is
        rank `leader`. Returns True if this call published the history.
        """
        if self._done or self._thread.is_alive():
            return False
        if self._problem:
            text = f"the history of the run before this hub started is lost: {self._problem}"
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
            with contextlib.suppress(WireError):  # an update of maximum size does not fit into a `Recalled`
                self._update_log.publish(piece)
        return bool(restored.curve or restored.summaries or restored.events)

    def close(self) -> None:
        """Stop reading."""
        self._stopping.set()
        self._thread.join(1.0)


@dataclass
class RestoredHistory:
    """The history of a run before a given step, oldest first: metric values in buckets of steps (`curve`), the
    summaries of the later steps, and events."""

    curve: Curve = field(default_factory=Curve)
    summaries: list[Summary] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def put_before(self, curve: Curve, summaries: list[Summary], events: list[Event]) -> None:
        """Insert history that is older than all data so far."""
        if self.curve:
            self.curve.extend(summaries)
        else:
            self.summaries = summaries + self.summaries
        for part in curve.parts():
            self.curve.insert(part)
        newer = self.events[0].time_s if self.events else None
        self.events = [one for one in events if newer is None or one.time_s < newer] + self.events


def first_step(curve: Curve, summaries: List[Summary]) -> int | None:
    """The oldest step in the curve or, without a curve, in the summaries."""
    return curve.first if curve else summaries[0].step if summaries else None


def belonging(found: List[Ending], leader: Hello, known: int | None) -> RestoredHistory | None:
    """The part of the recorded history that belongs to the current run. `found`: the recorded final states of earlier
    hub processes, newest first. `leader`: the hello of the current leader. `known`: the first step that the hub already
    has; only older steps are returned. None if it is not yet known which part belongs to the run.
    """
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
            break  # it is another run, or a later hub start already has all of this history
        restored.put_before(curve, older, ending.events)
        first = first_step(restored.curve, restored.summaries)
        known = known if first is None else first
    return restored


def _same_process(one: Hello, other: Hello) -> bool:
    """Whether both hellos are from the same process, which has begun to train at the same time."""
    return one.process == other.process and abs(one.began_s - other.began_s) < SAME_PROCESS_S


def _messages(restored: RestoredHistory) -> Iterator[Recalled]:
    """The messages to publish, newest first, because clients insert each message before the history that they already
    have.
    """
    yield from (Recalled(events=part) for part in _parts(restored.events))
    yield from (Recalled(summaries=part) for part in _parts(restored.summaries))
    yield from (Recalled(curve=[part]) for part in restored.curve.parts())


def _parts(messages: list[M]) -> Iterator[list[M]]:
    """Split the messages into lists of about `MESSAGE_BYTES` bytes each, and yield the list with the last messages
    first."""
    part: list[M] = []
    size = 0
    for message in reversed(messages):
        try:
            size += len(codec.pack(message))
        except WireError:  # too large for a message
            continue
        part.append(message)
        if size >= MESSAGE_BYTES:
            yield part[::-1]
            part, size = [], 0
    if part:
        yield part[::-1]
