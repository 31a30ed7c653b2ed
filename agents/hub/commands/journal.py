"""The command journal stores every proposal on disk before any process acts on it, and later the proposal's result.

A separate thread writes the file (`journal_file`) and calls fsync, so the hub never waits for the disk. If the file
cannot be opened, the thread retries; if the file is removed, the thread restores it.
"""

import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from agents.hub.commands.journal_file import BUSY_S, Found, JournalFile, Written
from agents.protocol import Event, clip
from agents.recording.commands import Entry, TrialEntry, sentence

PENDING_STATES = 4096  # maximum number of command states kept in memory while the disk is full
BATCH = 256
RETRY_S = 5.0  # interval between attempts to open the file
CHECK_S = 0.5  # interval between checks that the file still exists

_Request = tuple[bool, Entry] | TrialEntry | threading.Event | None


class Journal:
    """The command journal of one run: requests from the hub are queued for a thread that writes the file. `failure`:
    why the file could not be opened. While `failure` is set, every insert fails with this reason; `take_reopened`
    clears `failure`.

    `earlier`: the file in which an earlier release kept the commands of this run.
    """

    def __init__(self, path: Path, earlier: Path | None = None) -> None:
        self.failure = ""
        self.found = Found()
        self._path, self._earlier = path, earlier
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[Written] = queue.SimpleQueue()
        # The contents of the file, if only a later attempt to open it succeeded.
        self._late: queue.SimpleQueue[Found] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._pending_states: dict[tuple[str, int], Entry] = {}  # states not written yet
        self._pending_trials: dict[str, TrialEntry] = {}
        self._file: JournalFile | None = None
        self._removed = ""  # why a removed file cannot be restored
        self._retry_s = time.monotonic() + RETRY_S
        self.wake_fd, self._wake = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(self._wake, False)
        try:
            self._file = JournalFile(path, earlier)
            self.found = self._file.found
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            why = f"the journal {path} cannot be opened ({sentence(error)})"
            self.failure = f"{why}; changes are refused, telemetry continues"
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def take_reopened(self) -> bool:
        """Whether the journal file has been opened after an earlier failure. In this case, set `found` to the commands
        and trials in the file and clear `failure`."""
        with contextlib.suppress(queue.Empty):
            self.found = self._late.get_nowait()
            self.failure = ""
            return True
        return False

    def take_events(self) -> Iterator[Event]:
        """Events about the journal file since the last call, for the run's log."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._events.get_nowait()

    def insert(self, entry: Entry) -> None:
        """Write a new command; `take` returns it when it is on disk."""
        # The thread must not get the entry: until `take_reopened`, the used revisions are unknown.
        if self.failure:
            self._written.put(Written(entry, error=self.failure))
            self._wake_up()
            return
        self._requests.put((True, entry))

    def update(self, entry: Entry) -> None:
        """Write a command's new state to disk. If the disk is full, the state is written with a later request."""
        self._requests.put((False, entry))

    def put_trial(self, entry: TrialEntry) -> None:
        """Write a trial's state to disk, not later than any command that is passed to `insert` after this call."""
        self._requests.put(entry)

    def take(self) -> list[Written]:
        """The commands that have been written, or could not be written, since the last call; `wake_fd` is readable if
        there are any."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_fd, 4096)
        written = []
        with contextlib.suppress(queue.Empty):
            while True:
                written.append(self._written.get_nowait())
        return written

    def flush(self, timeout_s: float = 2.0) -> None:
        """Wait at most `timeout_s` until every request made so far has been written or has failed."""
        done = threading.Event()
        self._requests.put(done)
        done.wait(timeout_s)

    def close(self) -> None:
        """Write all outstanding requests, then end the thread."""
        self._requests.put(None)
        self._thread.join(timeout=BUSY_S)

    # ------------------------------------------------------------------------------------------ the thread

    def _work(self) -> None:
        ending = False
        while not ending:
            requests: list[_Request] = []
            with contextlib.suppress(queue.Empty):
                requests.append(self._requests.get(timeout=CHECK_S))
            while len(requests) < BATCH and not self._requests.empty():
                requests.append(self._requests.get())
            ending = None in requests
            self._check_file()
            if requests:
                self._write(requests)
            for request in requests:
                if isinstance(request, threading.Event):
                    request.set()
            if requests:
                self._wake_up()
        if self._file:
            self._file.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # if the pipe is full, the hub wakes up anyway
            os.write(self._wake, b"w")

    def _check_file(self) -> None:
        """Retry opening the journal file if it is not open yet; restore the file if it was removed."""
        if self._file is None:
            self._open_late()
        elif self._file.removed:
            self._put_back(self._file)

    def _open_late(self) -> None:
        if time.monotonic() < self._retry_s:
            return
        self._retry_s = time.monotonic() + RETRY_S
        with contextlib.suppress(sqlite3.Error, msgspec.MsgspecError):
            self._file = JournalFile(self._path, self._earlier)
            self._late.put(self._file.found)
            self._log("info", f"the journal {self._path} is open: changes are accepted again")

    def _put_back(self, file: JournalFile) -> None:
        try:
            file.put_back()
        except (sqlite3.Error, OSError) as error:
            why = f"the journal {self._path} was removed and cannot be restored ({sentence(error)})"
            if why != self._removed:
                self._log("error", f"{why}; changes are refused, telemetry continues")
            self._removed = why
            return
        self._removed = ""
        self._log("warning", f"the journal {self._path} was removed; it is restored with its whole content")

    def _log(self, level: Literal["info", "warning", "error"], text: str) -> None:
        self._events.put(Event(time.time(), level, "hub", clip(text)))

    def _write(self, requests: list[_Request]) -> None:
        pairs = [request for request in requests if isinstance(request, tuple)]
        new = [entry for is_new, entry in pairs if is_new]
        states = [entry for is_new, entry in pairs if not is_new]
        self._pending_states |= {(entry.state.id, entry.state.revision): entry for entry in states}
        trials = [request for request in requests if isinstance(request, TrialEntry)]
        self._pending_trials |= {entry.state.id: entry for entry in trials}
        while len(self._pending_states) > PENDING_STATES:
            del self._pending_states[next(iter(self._pending_states))]
        failure = ""
        written: list[Written] = []
        if self._file is None or self._removed:
            failure = f"{self._removed or f'the journal {self._path} is not open'}; the change is refused"
        else:
            try:
                written = self._file.write(new, self._pending_states.values(), self._pending_trials.values())
                self._forget_pending()
            except sqlite3.Error as error:
                failure = (
                    f"the journal cannot be written ({error}); the change is refused, telemetry continues"
                )
            except Exception as error:  # noqa: BLE001 - a damaged row or a bug must not end the thread
                self._forget_pending()  # one of the pending states may be the cause
                failure = (
                    f"the journal cannot write this ({error!r}); the change is refused, telemetry continues"
                )
        for one in [Written(entry, error=failure) for entry in new] if failure else written:
            self._written.put(one)

    def _forget_pending(self) -> None:
        self._pending_states.clear()
        self._pending_trials.clear()
