"""Standard output and standard error of a run. A run never waits for the reader of its output for longer than a bounded
time, a failed write does not end the run, and the output is also written to `engine.log` in the run's folder.

The descriptors 1 and 2 of the run and of all its ranks lead to an *output process*, which reads them all the time. So
no write of the run can block: not a line of the output, nor a warning of a rank, nor a message of a library in C. In
the output process, a bounded queue is in front of each stream and of the log, with a thread that writes.
"""

import io
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

import msgspec

from agents.rundir.hub_supervisor import say
from agents.rundir.runs import RunError
from agents.transport.open_files import descriptor_of
from engine.launch.processes.line_queues import LogQueue, StreamQueue

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

LOG = "engine.log"  # name of the file in the run's folder
STDOUT, STDERR = 1, 2
NAMES = {STDOUT: "standard output", STDERR: "standard error"}

END_S = 5.0  # at the end of the run: how long to write the rest of the output, if its readers read
READ_BYTES = 1 << 16
ANSWER_S = 2.0  # how long the run waits for an answer of the output process
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class StandardStream(io.FileIO):
    """A standard stream that ignores failed writes. The first failed write to standard output is reported on stderr."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)
        self._failed = False

    def write(self, data: "Buffer") -> int:
        view = memoryview(data).cast("B")
        try:
            return super().write(view)
        except OSError as error:
            if self.fileno() == STDOUT and not self._failed:
                say(_failure(error, None))
            self._failed = True
            return len(view)


def standard_stream(descriptor: int = STDOUT) -> io.TextIOWrapper:
    """A line-buffered text stream over a `StandardStream`, to replace `sys.stdout` or `sys.stderr`."""
    return io.TextIOWrapper(
        io.BufferedWriter(StandardStream(descriptor)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


class StandardOutput:
    """Context manager that puts the output process in front of standard output and standard error of this process, and
    of all processes that it forks or starts. Enter it before the process starts threads.

    At its exit, the lines that are still queued are written, for at most `END_S` seconds and while the reader reads.
    """

    def __init__(self, as_json: bool):
        self._as_json = as_json
        # For each descriptor: 1 if its lines are dropped, 2 if `take_loss` has returned that. Shared with all forks.
        self._lost = mmap.mmap(-1, 3)
        self._log: Path | None = None

    def __enter__(self) -> Self:
        self._originals = {number: os.dup(number) for number in NAMES}
        same = os.path.samestat(os.fstat(STDOUT), os.fstat(STDERR))
        # With one file for both streams, one pipe keeps the order of their lines.
        pipes = {number: os.pipe() for number in ([STDOUT] if same else NAMES)}
        self._control, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
        try:
            child = os.fork()
            if child == 0:
                sources = {number: pipe[0] for number, pipe in pipes.items()}
                _start_output_process(sources, self._originals, theirs, self._lost, self._as_json)
            _, failed = os.waitpid(child, 0)
        except OSError as error:
            raise RunError(f"cannot start a process for the output: {error.strerror}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
        if failed:
            raise RunError("cannot start a process for the output")
        theirs.close()
        for number in NAMES:
            os.dup2((pipes.get(number) or pipes[STDOUT])[1], number)
        for pipe in pipes.values():
            os.close(pipe[0])
            os.close(pipe[1])
        self._former = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = standard_stream(STDOUT), standard_stream(STDERR)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptors back, and wait until the output process has written the rest of the output. A second
        call does nothing."""
        if not self._originals:
            return
        originals, self._originals = self._originals, {}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, original in originals.items():
            os.dup2(original, number)
            os.close(original)
        sys.stdout, sys.stderr = self._former
        with suppress(OSError):
            self._control.send(b"end")
        self._answer(END_S + 1)
        self._control.close()

    def copy_to(self, folder: Path) -> None:
        """Also append all further output to ``engine.log`` in `folder`."""
        path = folder / LOG
        try:
            log = descriptor_of(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            say(f"cannot write {path}: {error.strerror}; the run continues without it\n")
            return
        self._log = path
        with suppress(OSError):
            socket.send_fds(self._control, [os.fsencode(path)], [log])
            self._answer(ANSWER_S)
        os.close(log)

    def take_loss(self) -> str | None:
        """One sentence, once for each stream of which lines have been dropped; else None."""
        for number, name in NAMES.items():
            if self._lost[number] == 1:
                self._lost[number] = 2
                return _loss(name, self._log)
        return None

    def _answer(self, within_s: float) -> None:
        """Wait for an answer of the output process, or for its end."""
        if select.select([self._control], [], [], within_s)[0]:
            with suppress(OSError):
                self._control.recv(1)


def _failure(error: OSError, log: str | None) -> str:
    why = "its reader has closed it" if isinstance(error, BrokenPipeError) else error.strerror
    instead = f"; {log} has the remaining output" if log else ""
    return f"cannot write to standard output: {why}; the run continues without it{instead}\n"


def _loss(name: str, log: Path | None) -> str:
    where = f"{log} has them" if log else "they are lost"
    return f"nobody reads {name}: the run continues, and lines are dropped there; {where}"


# ------------------------------------------------------------------------------------------- output process


def _start_output_process(
    sources: dict[int, int], targets: dict[int, int], control: socket.socket, lost: mmap.mmap, as_json: bool
) -> NoReturn:
    """Start the output process, which copies each source to its target and to the log until the run ends, and exit. The
    output process is a grandchild of the run: it is not among the children that a run supervises, and init reaps it."""
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    try:
        for number in _ENDS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
        _keep_only({*sources.values(), *targets.values(), control.fileno()})
        OutputProcess(sources, targets, lost, as_json).serve(control)
    finally:
        os._exit(0)


def _keep_only(descriptors: set[int]) -> None:
    """Close all other descriptors, so that the readers of other pipes do not wait for this process. The standard
    descriptors become the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    kept = [2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]
    for low, high in pairwise(kept):
        os.closerange(low + 1, high)


class OutputProcess:
    """Copies each stream of a run to its target and to the log. `sources` and `targets`: descriptors by stream; a
    stream that has no source of its own shares that of standard output."""

    def __init__(self, sources: dict[int, int], targets: dict[int, int], lost: mmap.mmap, as_json: bool):
        self._lost, self._as_json = lost, as_json
        self._log: LogQueue | None = None
        self._log_path: str | None = None
        self._copied: set[int] = set()  # the sources whose output is also written to the log
        self._queues = {
            number: StreamQueue(targets[number], self._gap, self._reporter(number), self._failed(number))
            for number in sources
        }
        self._targets = targets
        self._ending, self._end = os.pipe()
        self._readers = [
            threading.Thread(target=self._read, args=one, daemon=True) for one in sources.items()
        ]

    def serve(self, control: socket.socket) -> None:
        """Copy until the run says that it ends, or until all its processes have ended."""
        for reader in self._readers:
            reader.start()
        # If the run is killed, its end of the socket closes with its last process.
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
            if not descriptors:
                break
            self._open_log(os.fsdecode(message), descriptors[0])
            control.send(b".")
        os.close(self._end)
        for reader in self._readers:
            reader.join()
        self._finish()

    def _open_log(self, path: str, descriptor: int) -> None:
        log = os.fstat(descriptor)
        # If a launcher such as the demo has already redirected a stream to this file, do not write everything twice.
        self._copied = {
            number for number in self._queues if not os.path.samestat(os.fstat(self._targets[number]), log)
        }
        self._log_path = path
        self._log = LogQueue(descriptor, path, self._say)

    def _read(self, number: int, source: int) -> None:
        """Copy a source until it ends, or until the run ends and the source is empty."""
        poll = select.poll()
        poll.register(source, select.POLLIN)
        poll.register(self._ending, select.POLLIN)
        while source in {descriptor for descriptor, _ in poll.poll()}:
            data = os.read(source, READ_BYTES)
            if not data:
                return
            if self._log and number in self._copied:
                self._log.put(data)
            self._queues[number].put(data)

    def _finish(self) -> None:
        """Write what is still queued, as long as the readers read, and at most for `END_S` seconds."""
        now = time.monotonic()
        for number, queue in self._queues.items():
            if not queue.flush(now, now + END_S):
                self._note(f"nobody reads {NAMES[number]}: the last lines are missing there\n")
        if self._log:
            self._log.flush(time.monotonic(), now + END_S)

    def _gap(self, lines: int) -> bytes:
        """What a stream has in place of lines that were dropped."""
        if self._as_json:
            return msgspec.json.encode({"event": "missing", "lines": lines, "log": self._log_path}) + b"\n"
        where = f"; {self._log_path} has them" if self._log_path else ""
        return f"[{lines} line{'s' * (lines != 1)} of output missing here{where}]\n".encode()

    def _reporter(self, number: int) -> Callable[[], None]:
        """Called when the first line of a stream is dropped."""

        def report() -> None:
            self._lost[number] = 1
            text = _loss(NAMES[number], Path(self._log_path) if self._log_path else None) + "\n"
            if number == STDERR or STDERR not in self._queues:
                self._note(text)
            else:
                self._say(text)

        return report

    def _failed(self, number: int) -> Callable[[OSError], None]:
        """Called when a stream cannot be written any more."""

        def report(error: OSError) -> None:
            if number == STDOUT:
                self._say(_failure(error, self._log_path))

        return report

    def _say(self, text: str) -> None:
        """Write to standard error and to the log, as the run's own messages; neither waits."""
        self._note(text)
        if queue := self._queues.get(STDERR):
            queue.put(text.encode(errors="backslashreplace"), patient=False)
        elif not self._queues[STDOUT].failed:
            self._queues[STDOUT].put(text.encode(errors="backslashreplace"), patient=False)

    def _note(self, text: str) -> None:
        if self._log:
            self._log.put(text.encode(errors="backslashreplace"))
