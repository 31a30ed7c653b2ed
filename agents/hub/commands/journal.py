"""The command journal: every proposal and its result, on disk before anyone acts on it.

SQLite in WAL mode with `synchronous=FULL`, in its own file so that the recording never blocks it; its own thread runs
the fsync, so the hub never waits for a disk. A file that cannot be opened is retried; a removed file is restored.
"""

import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from agents.protocol import CommandState, Event, clip
from agents.protocol.base import Revision
from agents.recording.commands import (
    INSERT,
    LATER,
    PUT_TRIAL,
    SCHEMA,
    TRIALS,
    UPSERT,
    Entry,
    TrialEntry,
    command_of,
    read_commands,
    readable_rows,
    row_of,
    rows,
    sentence,
    tables,
    trial_of,
    trial_row,
)
from agents.recording.database import OpenFile, put_back, readable, torn

PRUNE = (
    "DELETE FROM commands WHERE revision = 0 AND rowid NOT IN "
    "(SELECT rowid FROM commands WHERE revision = 0 ORDER BY rowid DESC LIMIT ?)"
)
PRUNE_TRIALS = "DELETE FROM trials WHERE rowid NOT IN (SELECT rowid FROM trials ORDER BY rowid DESC LIMIT ?)"
NEWEST_LOADED = 1024  # commands loaded at start, besides every unsettled one
REFUSED_KEPT = 4096  # rejected proposals kept on disk, so that repeated bad ones cannot fill it
TRIALS_LOADED = 64
TRIALS_KEPT = 4096
PRUNE_PERIOD = 1024  # commands
PENDING_STATES = 4096  # states kept in memory while the disk is full
BATCH = 256
BUSY_S = 10.0  # longest wait for another reader of the file, such as a backup
OPEN_S = 1.0  # the same at opening, when the hub does wait
RETRY_S = 5.0  # between attempts to open the file
CHECK_S = 0.5  # between checks that the file still exists


class Written(Struct, frozen=True):
    """Result of `Journal.insert`: on disk; or `error`; or `known`, if the journal already had the id."""

    entry: Entry
    error: str = ""
    known: CommandState | None = None


@dataclass(frozen=True)
class Found:
    """Contents of the journal when it was opened, oldest first."""

    last_revision: int = 0
    entries: list[Entry] = field(default_factory=list)  # the newest, and every unsettled one
    trials: list[TrialEntry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # unreadable parts, a sentence each


_Request = tuple[bool, Entry] | TrialEntry | threading.Event | None


class Journal:
    """The queues between the hub and the thread that writes the file. `failure`: why the file cannot be used; every
    insert fails with it until `take_reopened`.

    `earlier`: the file in which an earlier release kept the commands of this run.
    """

    def __init__(self, path: Path, earlier: Path | None = None) -> None:
        self.failure = ""
        self.found = Found()
        self._path, self._earlier = path, earlier
        self._inserted = 0  # since the last pruning
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[Written] = queue.SimpleQueue()
        self._late: queue.SimpleQueue[Found] = (
            queue.SimpleQueue()
        )  # result of a later attempt to open the file
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._pending_states: dict[tuple[str, int], Entry] = {}  # states not written yet
        self._pending_trials: dict[str, TrialEntry] = {}
        self._db: sqlite3.Connection | None = None
        self._file: OpenFile | None = None
        self._removed = ""  # why a removed file cannot be restored
        self._retry_s = time.monotonic() + RETRY_S
        self.wake_fd, self._wake = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(self._wake, False)
        try:
            self.found = self._open()
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            why = f"the journal {path} cannot be opened ({sentence(error)})"
            self.failure = f"{why}; changes are refused, telemetry goes on"
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def take_reopened(self) -> bool:
        """Whether a file that could not be opened is open now; `found` then has its contents."""
        with contextlib.suppress(queue.Empty):
            self.found = self._late.get_nowait()
            self.failure = ""
            return True
        return False

    def take_events(self) -> Iterator[Event]:
        """Events about the file since the last call, for the run's log."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._events.get_nowait()

    def insert(self, entry: Entry) -> None:
        """Write a new command; `take` returns it when it is on disk."""
        if (
            self.failure
        ):  # checked here, not in the thread: until `take_reopened` the revisions in use are unknown
            self._written.put(Written(entry, error=self.failure))
            self._wake_up()
            return
        self._requests.put((True, entry))

    def update(self, entry: Entry) -> None:
        """Write a command's new state; if the disk is full, the next write includes it."""
        self._requests.put((False, entry))

    def put_trial(self, entry: TrialEntry) -> None:
        """Write a trial's state before any command that is inserted later."""
        self._requests.put(entry)

    def take(self) -> list[Written]:
        """Results since the last call; `wake_fd` is readable when there are any."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_fd, 4096)
        written = []
        with contextlib.suppress(queue.Empty):
            while True:
                written.append(self._written.get_nowait())
        return written

    def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until all requests so far are written or have failed."""
        done = threading.Event()
        self._requests.put(done)
        done.wait(timeout_s)

    def close(self) -> None:
        """Write all requests, then end the thread."""
        self._requests.put(None)
        self._thread.join(timeout=BUSY_S)

    # ------------------------------------------------------------------------------------------ the thread

    def _open(self) -> Found:
        db = self._connect(OPEN_S)
        try:
            lost = torn(db, self._path)
            known = tables(db)
            db.execute("BEGIN IMMEDIATE")
            db.execute(SCHEMA)
            db.execute(TRIALS)
            for table, columns in LATER.items():
                there = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
                for column in columns.keys() - there:
                    db.execute(f"ALTER TABLE {table} ADD COLUMN {column} {columns[column]}")
            problems = [lost] if lost else []
            if "commands" not in known and self._earlier:
                problems += self._import_earlier(db, self._earlier)
            db.execute(PRUNE, (REFUSED_KEPT,))
            db.execute(PRUNE_TRIALS, (TRIALS_KEPT,))
            db.execute("COMMIT")
            found = self._load(db, problems)
            db.execute(f"PRAGMA busy_timeout={int(1000 * BUSY_S)}")
        except BaseException:
            db.close()
            raise
        self._db, self._file = db, OpenFile(self._path)
        return found

    def _connect(self, timeout_s: float) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=timeout_s)
        db.text_factory = readable
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
        except sqlite3.Error:
            db.close()
            raise
        return db

    @staticmethod
    def _import_earlier(db: sqlite3.Connection, earlier: Path) -> list[str]:
        """Copy the journal of an earlier release; returns its unreadable parts."""
        journalled = read_commands(earlier)
        db.executemany(INSERT, map(row_of, journalled.commands))
        db.executemany(PUT_TRIAL, map(trial_row, journalled.trials))
        return journalled.damage

    def _load(self, db: sqlite3.Connection, problems: list[str]) -> Found:
        newest = db.execute("SELECT COALESCE(MAX(revision), 0) FROM commands").fetchone()[0]
        last = msgspec.convert(newest, Revision)  # SQLite does not enforce column types
        loaded = (
            "commands WHERE state = 'accepted' OR rowid IN "
            f"(SELECT rowid FROM commands ORDER BY rowid DESC LIMIT {NEWEST_LOADED})"
        )
        unreadable: list[str] = []
        entries = list(readable_rows(rows(db, loaded), command_of, unreadable))
        loaded = f"trials WHERE rowid IN (SELECT rowid FROM trials ORDER BY rowid DESC LIMIT {TRIALS_LOADED})"
        trials = list(readable_rows(rows(db, loaded), trial_of, unreadable))
        if unreadable:
            cannot = f"{len(unreadable)} rows of the journal cannot be read; they are left out"
            problems = [*problems, cannot]
        return Found(last, entries, trials, problems)

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
        if self._db:
            self._db.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the hub anyway
            os.write(self._wake, b"w")

    def _check_file(self) -> None:
        """Open the file if that failed before; restore it if it was removed."""
        if self._db is None:
            self._open_late()
        elif self._file and self._file.removed:
            self._put_back(self._db)

    def _open_late(self) -> None:
        if time.monotonic() < self._retry_s:
            return
        self._retry_s = time.monotonic() + RETRY_S
        with contextlib.suppress(sqlite3.Error, msgspec.MsgspecError):
            self._late.put(self._open())
            self._log("info", f"the journal {self._path} is open: changes are taken again")

    def _put_back(self, db: sqlite3.Connection) -> None:
        try:
            put_back(db, self._path)
            self._db = self._connect(BUSY_S)
            tables(self._db)  # a read makes SQLite open its log and index
        except (sqlite3.Error, OSError) as error:
            why = f"the journal {self._path} was removed and cannot be put back ({sentence(error)})"
            if why != self._removed:
                self._log("error", f"{why}; changes are refused, telemetry goes on")
            self._removed = why
            return
        self._file, self._removed = OpenFile(self._path), ""
        self._log("warning", f"the journal {self._path} was removed; it is put back, with all that was in it")

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
        db, failure = self._db, ""
        if db is None or self._removed:
            failure = f"{self._removed or f'the journal {self._path} is not open'}; the change is refused"
        written: list[Written] = []
        if db and not failure:
            try:
                db.execute("BEGIN IMMEDIATE")
                db.executemany(UPSERT, map(row_of, self._pending_states.values()))
                db.executemany(PUT_TRIAL, map(trial_row, self._pending_trials.values()))
                written = [_insert(db, entry) for entry in new]
                self._prune(db, len(new))
                db.execute("COMMIT")
                self._pending_states.clear()
                self._pending_trials.clear()
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                failure = f"the journal cannot be written ({error}); the change is refused, telemetry goes on"
            except Exception as error:  # noqa: BLE001 - a damaged row or a bug must not end the thread
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                self._pending_states.clear()  # one of them may be the unwritable one
                self._pending_trials.clear()
                failure = (
                    f"the journal cannot write this ({error!r}); the change is refused, telemetry goes on"
                )
        for one in [Written(entry, error=failure) for entry in new] if failure else written:
            self._written.put(one)

    def _prune(self, db: sqlite3.Connection, inserted: int) -> None:
        """Delete the oldest rows from time to time, since a hub may run for months."""
        self._inserted += inserted
        if self._inserted >= PRUNE_PERIOD:
            self._inserted = 0
            db.execute(PRUNE, (REFUSED_KEPT,))
            db.execute(PRUNE_TRIALS, (TRIALS_KEPT,))


def _insert(db: sqlite3.Connection, entry: Entry) -> Written:
    try:
        db.execute(INSERT, row_of(entry))
    except sqlite3.IntegrityError:
        known = rows(db, "commands WHERE id = ?", entry.state.id)
        try:
            return Written(entry, known=command_of(next(known)).state)
        except (msgspec.MsgspecError, StopIteration):
            return Written(entry, error="the journal holds a command of this name that cannot be read")
    return Written(entry)
