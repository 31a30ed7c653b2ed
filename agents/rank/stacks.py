"""The Python stacks of this process, read by the agent's thread while the training thread hangs in a collective.

Collectives release the GIL, so the agent's thread continues to run. Reading a source file may hang too, for example on
a network disk. So a separate thread reads the source lines, and the agent's thread waits at most `READ_S` seconds for
it.
"""

import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from agents import protocol
from agents.protocol import CodeFrame, Pulse, RankStacks, StackQuery, ThreadStack
from agents.protocol.stacks import MOST_FRAMES, MOST_THREADS, WORD
from agents.rank.errors import named, sendable

PERIOD_S = 2.0  # minimum interval between two answers
READ_S = 0.5  # maximum wait for lines of source and for the program's recorder of collectives
OUTERMOST = 16  # frames kept at the outer end of a stack that has more than `MOST_FRAMES`
TEXT_BYTES = 48 << 10  # maximum size of all frames of an answer; further threads are left out

Recorder = Callable[[], str]
"""Returns what the program knows about its most recent collectives, in one sentence; "" if it knows nothing."""


@dataclass(frozen=True)
class _Place:
    """A frame whose source line has not been read yet, with the data needed to find that line."""

    frame: FrameType
    line: int


class Stacks:
    """Answers the hub's queries for the Python stacks of this process. `training`: the training thread, whose stack
    comes first."""

    def __init__(self, training: int) -> None:
        self.recorder: Recorder | None = None
        self._training = training
        self._began_s = time.time()
        self._answered_s = -PERIOD_S
        self._reading: threading.Thread | None = None

    def answer(self, query: StackQuery, pulse: Pulse) -> RankStacks | None:
        """The stacks of this process, with the operation that `pulse` names; None if this method returned stacks less
        than `PERIOD_S` ago."""
        now = time.monotonic()
        if now - self._answered_s < PERIOD_S:
            return None
        self._answered_s = now
        found = list(self._threads(query.threads))
        code, collective = self._read([place for _, places in found for place in places])
        threads: list[ThreadStack] = []
        left = TEXT_BYTES
        for name, places in found[:MOST_THREADS]:
            thread = _thread(name, places, code)
            left -= sum(len(one.file) + len(one.function) + len(one.code) + 16 for one in thread.frames)
            if left < 0 and threads:
                break
            threads.append(thread)
        omitted = len(found) - len(threads)
        return RankStacks(
            pulse.rank, query.id, pulse.step, pulse.doing, pulse.since_ms, threads, omitted, collective
        )

    def _threads(self, everything: bool) -> Iterator[tuple[str, list[_Place]]]:
        """The name and the frames of the training thread and, if `everything` is True, of all other threads except the
        calling thread."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        training = self._training if self._training in frames else threading.main_thread().ident or 0
        others = sorted(frames.keys() - {training, threading.get_ident()}) if everything else []
        for ident in [training, *others]:
            if ident in frames:
                yield names.get(ident, f"thread {ident}"), _places(frames[ident])

    def _read(self, places: list[_Place]) -> tuple[dict[tuple[str, int], str], str]:
        """Read the source lines, by file and line number, and the recorder's one-sentence description of the most
        recent collectives. Whatever cannot be read within `READ_S` seconds is left out.
        """
        code: dict[tuple[str, int], str] = {}
        sentence: list[str] = []
        if self._reading is not None and self._reading.is_alive():
            return code, ""  # the thread of an earlier answer still waits for a file

        def read() -> None:
            try:
                if self.recorder:
                    sentence.append(self.recorder())
            except Exception as error:  # noqa: BLE001 - an error of the program's hook must not hide the stacks
                sentence.append(f"the recorder of collectives failed: {named(error)}")
            for place in places:
                key = place.frame.f_code.co_filename, place.line
                if key not in code:
                    code[key] = _line_of_source(place, self._began_s)

        self._reading = threading.Thread(target=read, name="agent stacks", daemon=True)
        self._reading.start()
        self._reading.join(READ_S)
        return dict(code), protocol.clip(sendable(sentence[0])) if sentence else ""


def _places(frame: FrameType | None) -> list[_Place]:
    """The frames of a thread, outermost first, without the frames of the hooks that `cockpit wrap` installs. If a rank
    hangs, it hangs in the torch function that the hook calls, not in the hook itself, and the hooks are not part of the
    user's program.
    """
    places = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_HOOKS):
            places.append(_Place(frame, frame.f_lineno or 0))
        frame = frame.f_back
    return places[::-1]


def _line_of_source(place: _Place, began_s: float) -> str:
    """The source line; "" if the file has changed since the process started, because the line may be different now."""
    file = place.frame.f_code.co_filename
    try:
        if os.path.exists(file) and os.stat(file).st_mtime > began_s:
            return ""
        return linecache.getline(file, place.line, place.frame.f_globals).strip()
    except Exception:  # noqa: BLE001 - a loader of the program may fail in any way
        return ""


def _thread(name: str, places: list[_Place], code: dict[tuple[str, int], str]) -> ThreadStack:
    omitted = max(0, len(places) - MOST_FRAMES)
    kept = places[:OUTERMOST] + places[OUTERMOST + omitted :] if omitted else places
    frames = [
        CodeFrame(
            _end(sendable(one.frame.f_code.co_filename)),
            one.line,
            sendable(_name(one.frame))[:WORD],
            sendable(code.get((one.frame.f_code.co_filename, one.line), ""))[:WORD],
            _installed(one.frame.f_code.co_filename),
        )
        for one in kept
    ]
    return ThreadStack(sendable(name)[:WORD], frames, omitted, OUTERMOST if omitted else 0)


def _name(frame: FrameType) -> str:
    """The name of a frame's function, with its class if this Python version provides the class."""
    name: str = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
    return name


def _end(file: str) -> str:
    return file if len(file) <= WORD else f"…{file[1 - WORD :]}"


# This package is installed code too if it runs from a checkout.
_AGENTS = str(Path(__file__).parents[1])
_HOOKS = os.path.join(_AGENTS, "wrap", "")
_PREFIXES = tuple(
    f"{folder}{os.sep}"
    for folder in {
        _AGENTS,
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
    if folder
)


def _installed(file: str) -> bool:
    return file.startswith(("<frozen", *_PREFIXES)) or f"{os.sep}site-packages{os.sep}" in file
