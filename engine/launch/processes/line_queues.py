"""Bounded queues in front of files that may not accept output: a standard stream that nobody reads, or the log on a
full disk. The thread of a queue writes, so `put` waits for a bounded time at most."""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

QUEUE_BYTES = 1 << 18  # maximum size of a queue; about 250 lines of `--json`
# While the queue of a stream is full, `put` waits for the reader: this long in total until the queue is empty again.
PATIENCE_S = 2.0
IDLE_S = 2.0  # at the end: how long to wait without progress
WRITE_BYTES = 4096  # PIPE_BUF of Linux: the kernel does not split a write of this size to a pipe


class LineQueue:
    """A bounded queue of output in front of a file, and a thread that writes it. If the queue stays full, whole lines
    are dropped, and `_gap` stands in their place."""

    _renews = False  # whether each written part renews the time that `put` may wait

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self._size = 0  # bytes that are queued or being written
        self._change = threading.Condition()
        self._left_s = PATIENCE_S
        self._inside = False  # the queued output ends inside a line
        self._missing = 0  # complete lines that were dropped since the last queued line
        self._dropping_inside = False  # the dropped output ends inside a line
        self._reported = False
        self._progress_s = time.monotonic()
        self.failed = False
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, data: bytes, patient: bool = True) -> None:
        """Queue output, or drop lines of it."""
        with self._change:
            self._put(data, patient)
            report = self._missing + self._dropping_inside > 0 and not self._reported
            self._reported |= report
        if report:
            self._on_first_loss()

    def flush(self, since: float, end: float) -> bool:
        """Wait until everything is written. Gives up at `end`, or `IDLE_S` after `since` or after later progress (all
        monotonic times). Returns whether nothing of the queue is lost."""
        with self._change:
            if self._missing:
                self._append(self._gap(self._missing))
                self._missing = 0
            while self._size and not self.failed:
                now = time.monotonic()
                rest = min(end, max(since, self._progress_s) + IDLE_S) - now
                if rest <= 0:
                    return False
                self._change.wait(rest)
        return True

    def _put(self, data: bytes, patient: bool) -> None:
        if self.failed:
            return
        if self._dropping_inside:
            _, newline, data = data.partition(b"\n")
            if not newline:
                return
            self._dropping_inside = False
            self._missing += 1
        if not data:
            return
        if self._missing:
            if self._size > QUEUE_BYTES // 2:
                self._drop(data)
                return
            self._append(self._gap(self._missing))
            self._missing = 0
        if not self._has_room(len(data)) and patient:
            began = time.monotonic()
            self._change.wait_for(lambda: self._has_room(len(data)), self._left_s)
            self._left_s = max(0.0, self._left_s - (time.monotonic() - began))
        if self._has_room(len(data)):
            self._append(data)
            return
        if self._inside and self._size < 2 * QUEUE_BYTES:
            end = data.find(b"\n") + 1 or len(data)
            self._append(data[:end])
            data = data[end:]
        self._drop(data)

    def _has_room(self, size: int) -> bool:
        return self.failed or not self._size or self._size + size <= QUEUE_BYTES

    def _append(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        self._inside = not data.endswith(b"\n")
        self._change.notify_all()

    def _drop(self, data: bytes) -> None:
        if data:
            self._missing += data.count(b"\n")
            self._dropping_inside = not data.endswith(b"\n")
            if self._inside:
                self._append(b"\n")

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._parts)
                part = self._parts.popleft()
            at = 0
            while at < len(part) and not self.failed:
                written = self._write(part, at)
                at += written
                with self._change:
                    self._size -= written
                    self._progress_s = time.monotonic()
                    self._change.notify_all()
            with self._change:
                if self.failed:
                    self._parts.clear()
                    self._size = 0
                if not self._size or self._renews:
                    self._left_s = PATIENCE_S
                self._change.notify_all()

    def _write(self, part: bytes, at: int) -> int:
        """Write some bytes of `part`, beginning at `at`, and return how many."""
        raise NotImplementedError

    def _gap(self, lines: int) -> bytes:
        raise NotImplementedError

    def _on_first_loss(self) -> None:
        raise NotImplementedError


class StreamQueue(LineQueue):
    """The queue in front of a standard stream. After a failed write, such as to a closed pipe (``| head -4``) or a full
    disk, all output is discarded."""

    def __init__(
        self,
        descriptor: int,
        gap: Callable[[int], bytes],
        on_first_loss: Callable[[], None],
        on_failure: Callable[[OSError], None],
    ):
        self._descriptor = descriptor
        self._gap_of, self._report, self._on_failure = gap, on_first_loss, on_failure
        super().__init__()

    def _write(self, part: bytes, at: int) -> int:
        end = part.rfind(b"\n", at, at + WRITE_BYTES) + 1 or at + WRITE_BYTES
        try:
            return os.write(self._descriptor, part[at:end])
        except BlockingIOError:  # another process has made the stream non-blocking
            select.select([], [self._descriptor], [])
            return 0
        except OSError as error:
            self.failed = True
            self._on_failure(error)
            return 0

    def _gap(self, lines: int) -> bytes:
        return self._gap_of(lines)

    def _on_first_loss(self) -> None:
        self._report()


class LogQueue(LineQueue):
    """The queue in front of ``engine.log``. The first failed write is reported once. Later output is still written if
    possible, after a line that gives the number of bytes that could not be written. Unlike a reader, a file accepts
    output at once, so lines are dropped only if it accepts nothing for `PATIENCE_S`."""

    _renews = True

    def __init__(self, descriptor: int, path: str, say: Callable[[str], None]):
        self._descriptor, self._path, self._say = descriptor, path, say
        self._lost = 0  # bytes that the file did not accept
        self._said = False
        super().__init__()

    def _write(self, part: bytes, at: int) -> int:
        """Write as much as the file accepts. The rest is lost, so that a full disk does not fill the queue."""
        gap = f"\n[{self._lost} bytes of output are missing here]\n".encode() if self._lost else b""
        written = self._accepted(gap + part[at:])
        if written >= len(gap):
            self._lost = 0
        self._lost += len(part) - at - max(0, written - len(gap))
        return len(part) - at

    def _accepted(self, data: bytes) -> int:
        done = 0
        try:
            while done < len(data):  # a nearly full disk accepts a part
                done += os.write(self._descriptor, data[done:])
        except OSError as error:
            if not self._said:
                self._said = True
                why = f"{error.strerror}; the run continues, but output is missing there"
                self._say(f"cannot write {self._path}: {why}\n")
        return done

    def _gap(self, lines: int) -> bytes:
        return f"[{lines} lines of output are missing here]\n".encode()

    def _on_first_loss(self) -> None:
        pass
