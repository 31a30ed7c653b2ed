"""Runs the planner's computations in a thread, so that drawing never waits for them."""

import threading
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from engine.config.refusal import RefusedError

MOST_KEPT = 512  # maximum number of answers; the oldest are dropped


@dataclass(frozen=True)
class Answer:
    """A computed prediction, or the reason why there is none. `fresh`: False if this is an earlier prediction, and one
    from newer measurements is still being computed."""

    value: Any = None
    refusal: str = ""
    fresh: bool = True


@dataclass(frozen=True)
class _Question:
    key: Hashable
    version: int
    compute: Callable[[], Any]


class Worker:
    """Runs one thread, which ends when its queue is empty. `version` increases with each answer, so that panels know
    when to redraw."""

    def __init__(self) -> None:
        self.version = 0
        self._lock = threading.Lock()
        self._answers: dict[Hashable, tuple[int, Answer]] = {}
        self._open: dict[Hashable, _Question] = {}  # the newest is answered first
        self._running: _Question | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return bool(self._open or self._running)

    def ask(
        self, key: Hashable, compute: Callable[[], Any], version: int = 0, later: bool = False
    ) -> Answer | None:
        """Return the stored result for `key`, or None if there is none yet. `version`: the version of the data that
        `compute` reads. If there is no result for this version, queue `compute` for the thread, and return the result
        for an older version, if any, with `fresh` false. `later`: run `compute` only when no other computations are
        queued.
        """
        with self._lock:
            known = self._answers.get(key)
            if known and known[0] == version:
                return known[1]
            question = _Question(key, version, compute)
            running = self._running and (self._running.key, self._running.version) == (key, version)
            if not running and (later or key not in self._open):
                before = self._open.pop(key, None)
                self._open = (
                    {key: before or question, **self._open} if later else {**self._open, key: question}
                )
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="planner", daemon=True)
                self._thread.start()
            return Answer(known[1].value, known[1].refusal, fresh=False) if known else None

    def forget(self) -> None:
        """Empty the queue; a running computation continues."""
        with self._lock:
            self._open.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._open:
                    self._thread = self._running = None
                    return
                self._running = self._open.pop(next(reversed(self._open)))
            answer = _computed(self._running)
            with self._lock:
                self._answers.pop(self._running.key, None)
                self._answers[self._running.key] = self._running.version, answer
                while len(self._answers) > MOST_KEPT:
                    del self._answers[next(iter(self._answers))]
                self.version += 1


def _computed(question: _Question) -> Answer:
    try:
        return Answer(question.compute())
    except RefusedError as refusal:
        return Answer(refusal=str(refusal))
    except ModuleNotFoundError as missing:  # numpy is missing if only parts of the package are installed
        return Answer(
            refusal=f"the planner needs {missing.name}, which is not installed: pip install {missing.name}"
        )
    except Exception as error:  # noqa: BLE001 - a fault of the planner must not end the screen
        line = traceback.format_exception_only(error)[-1].strip()
        return Answer(refusal=f"the planner failed: {line}")
