"""The command journal: what was asked and what became of it, on disk before anyone acts on it.

SQLite in WAL mode with `synchronous=FULL`; its fsync runs on a thread of its own, so the hub never waits for
a disk.
"""

import contextlib
import os
import queue
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from agents.wire import Changes, CommandState, Revision, TrialState

SCHEMA = """
CREATE TABLE IF NOT EXISTS commands (
    id           TEXT PRIMARY KEY,   -- the client's own
    revision     INTEGER NOT NULL,   -- 0: refused before it had one
    state        TEXT NOT NULL,      -- accepted | applied | rejected | expired | rolled_back
    changes      TEXT NOT NULL,      -- JSON, knob -> value
    before       TEXT NOT NULL,      -- JSON, knob -> value
    who          TEXT NOT NULL,
    time_s       REAL NOT NULL,      -- of this state
    acks         INTEGER NOT NULL,
    world        INTEGER NOT NULL,
    applied_step INTEGER,
    why          TEXT NOT NULL,
    expires_step INTEGER,
    reason       TEXT NOT NULL DEFAULT '',   -- in the operator's words
    asked_s      REAL NOT NULL DEFAULT 0,
    undoes       INTEGER NOT NULL DEFAULT 0  -- the revision that this one takes back
)
"""
TRIALS = """
CREATE TABLE IF NOT EXISTS trials (
    id      TEXT PRIMARY KEY,  -- the client's own
    began_s REAL NOT NULL,
    entry   TEXT NOT NULL      -- JSON: how it stands, and the step times before
)
"""
PUT_TRIAL = "INSERT OR REPLACE INTO trials (id, began_s, entry) VALUES (?, ?, ?)"
LATER = {  # columns that a journal of an earlier release has not
    "reason": "TEXT NOT NULL DEFAULT ''",
    "asked_s": "REAL NOT NULL DEFAULT 0",
    "undoes": "INTEGER NOT NULL DEFAULT 0",
}
PRUNE = (
    "DELETE FROM commands WHERE revision = 0 AND rowid NOT IN "
    "(SELECT rowid FROM commands WHERE revision = 0 ORDER BY rowid DESC LIMIT ?)"
)
PRUNE_TRIALS = "DELETE FROM trials WHERE rowid NOT IN (SELECT rowid FROM trials ORDER BY rowid DESC LIMIT ?)"
COLUMNS = (*CommandState.__struct_fields__, "expires_step")
INSERT = f"INSERT INTO commands ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
# A refusal of an id that is older than what is remembered must not take the place of what became of it.
UPSERT = (
    f"{INSERT} ON CONFLICT (id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in COLUMNS)} "
    "WHERE commands.revision = excluded.revision"
)
SELECT = f"SELECT {', '.join(COLUMNS)} FROM commands"
NEWEST = 1024  # commands loaded at start, besides every unsettled one
REFUSED_KEPT = 4096  # refusals kept on disk: asking for nonsense all day must not fill it
TRIALS_LOADED = 64
TRIALS_KEPT = 4096
PRUNE_EVERY = 1024  # commands
OWED = 4096  # states that wait for a disk that is full
BATCH = 256
BUSY_S = 10.0  # the recorder writes to the same file, in short transactions


class Entry(Struct, frozen=True):
    """A command as the journal holds it."""

    state: CommandState
    expires_step: int | None = None


class TrialEntry(Struct, frozen=True):
    """A trial as the journal holds it."""

    state: TrialState
    times: list[float] = []  # ms, of the steps before
    others: Changes = {}  # values of the other knobs, before
    attempts: int = 1  # to take it back


class Written(Struct, frozen=True):
    """What became of `Journal.insert`: on disk; or why not; or `known`, if the id was there already."""

    entry: Entry
    error: str = ""
    known: CommandState | None = None


class JournalError(ValueError):
    """A journal that cannot be read; the text is one sentence for a person."""


def read_journal(path: Path) -> Iterator[CommandState | TrialState]:
    """All commands and trials of a run, ended or not, oldest first; the file is only read."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)
        ) as db:
            tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
            columns = [row[1] for row in db.execute("PRAGMA table_info(commands)")]
            known = [name for name in COLUMNS if name in columns]
            if "commands" in tables:
                for row in db.execute(f"SELECT {', '.join(known)} FROM commands ORDER BY rowid"):
                    yield _command(dict(zip(known, row, strict=True))).state
            if "trials" in tables:
                for row in db.execute("SELECT entry FROM trials ORDER BY began_s"):
                    yield msgspec.json.decode(row[0], type=TrialEntry).state
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise JournalError(f"the journal {path} cannot be read: {error}") from None


_T = TypeVar("_T")
_Request = tuple[bool, Entry] | TrialEntry | threading.Event | None


class Journal:
    """Commands on disk. `failure` says why it cannot be used at all; every insert then fails with it."""

    def __init__(self, path: Path) -> None:
        self.failure = ""
        self.last_revision = 0
        self.entries: list[Entry] = []  # as found at start, oldest first
        self.trials: list[TrialEntry] = []  # likewise
        self._inserted = 0  # since the last pruning
        self.unreadable = 0  # rows that were left out of both
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[Written] = queue.SimpleQueue()
        self._owed: dict[tuple[str, int], Entry] = {}  # states that could not be written yet
        self._owed_trials: dict[str, TrialEntry] = {}
        self.wake_fd, self._wake = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(self._wake, False)
        try:
            self._db = self._open(path)
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            why = " ".join(str(error).split())  # SQLite quotes what it has found
            self.failure = (
                f"the journal {path} cannot be opened ({why}); changes are refused, telemetry goes on"
            )
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def insert(self, entry: Entry) -> None:
        """Write a new command; `take` tells when it is on disk."""
        self._requests.put((True, entry))

    def update(self, entry: Entry) -> None:
        """Write what became of a command; if the disk is full now, it is written with the next one."""
        self._requests.put((False, entry))

    def put_trial(self, entry: TrialEntry) -> None:
        """Write how a trial stands, ahead of every command that is inserted later."""
        self._requests.put(entry)

    def take(self) -> list[Written]:
        """What was written since the last call; `wake_fd` is readable when there is something."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_fd, 4096)
        written = []
        with contextlib.suppress(queue.Empty):
            while True:
                written.append(self._written.get_nowait())
        return written

    def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until what is asked by now is written, or cannot be."""
        done = threading.Event()
        self._requests.put(done)
        done.wait(timeout_s)

    def close(self) -> None:
        """Write what is asked, then end the thread."""
        self._requests.put(None)
        self._thread.join(timeout=BUSY_S)

    # ------------------------------------------------------------------------------------------ the thread

    def _open(self, path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute(SCHEMA)
        known = {row[1] for row in db.execute("PRAGMA table_info(commands)")}
        for column in LATER.keys() - known:
            db.execute(f"ALTER TABLE commands ADD COLUMN {column} {LATER[column]}")
        db.execute(PRUNE, (REFUSED_KEPT,))
        newest = db.execute("SELECT COALESCE(MAX(revision), 0) FROM commands").fetchone()[0]
        self.last_revision = msgspec.convert(
            newest, Revision
        )  # a column of SQLite holds whatever was put there
        rows = db.execute(
            f"{SELECT} WHERE state = 'accepted' OR rowid IN "
            "(SELECT rowid FROM commands ORDER BY rowid DESC LIMIT ?) ORDER BY rowid",
            (NEWEST,),
        )
        self.entries = self._readable(map(_entry, rows))
        db.execute(TRIALS)
        db.execute(PRUNE_TRIALS, (TRIALS_KEPT,))
        newest = db.execute("SELECT entry FROM trials ORDER BY began_s DESC LIMIT ?", (TRIALS_LOADED,))
        self.trials = self._readable(map(_trial, newest))[::-1]
        return db

    def _readable(self, rows: Iterator[_T]) -> list[_T]:
        """What can be read; the rest is counted."""
        read: list[_T] = []
        while True:
            try:
                read.append(next(rows))
            except StopIteration:
                return read
            except msgspec.MsgspecError:
                self.unreadable += 1

    def _work(self) -> None:
        ending = False
        while not ending:
            requests = [self._requests.get()]
            while len(requests) < BATCH and not self._requests.empty():
                requests.append(self._requests.get())
            ending = None in requests
            self._write(requests)
            for request in requests:
                if isinstance(request, threading.Event):
                    request.set()
            with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups: it will wake
                os.write(self._wake, b"w")
        if not self.failure:
            self._db.close()

    def _write(self, requests: list[_Request]) -> None:
        pairs = [request for request in requests if isinstance(request, tuple)]
        new = [entry for is_new, entry in pairs if is_new]
        states = [entry for is_new, entry in pairs if not is_new]
        self._owed |= {(entry.state.id, entry.state.revision): entry for entry in states}
        trials = [request for request in requests if isinstance(request, TrialEntry)]
        self._owed_trials |= {entry.state.id: entry for entry in trials}
        while len(self._owed) > OWED:
            del self._owed[next(iter(self._owed))]
        failure = self.failure
        written: list[Written] = []
        if not failure:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany(UPSERT, map(_row, self._owed.values()))
                self._db.executemany(PUT_TRIAL, map(_trial_row, self._owed_trials.values()))
                written = [self._insert(entry) for entry in new]
                self._prune(len(new))
                self._db.execute("COMMIT")
                self._owed.clear()
                self._owed_trials.clear()
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                failure = f"the journal cannot be written ({error}); the change is refused, telemetry goes on"
            except Exception as error:  # noqa: BLE001 - a row that is damaged, or a mistake of ours: no reason to end
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                self._owed.clear()  # one of them may be what cannot be written
                self._owed_trials.clear()
                failure = (
                    f"the journal cannot write this ({error!r}); the change is refused, telemetry goes on"
                )
        for one in [Written(entry, error=failure) for entry in new] if failure else written:
            self._written.put(one)

    def _prune(self, inserted: int) -> None:
        """Now and then, for a hub may run for months."""
        self._inserted += inserted
        if self._inserted >= PRUNE_EVERY:
            self._inserted = 0
            self._db.execute(PRUNE, (REFUSED_KEPT,))
            self._db.execute(PRUNE_TRIALS, (TRIALS_KEPT,))

    def _insert(self, entry: Entry) -> Written:
        try:
            self._db.execute(INSERT, _row(entry))
        except sqlite3.IntegrityError:
            row = self._db.execute(f"{SELECT} WHERE id = ?", (entry.state.id,)).fetchone()
            try:
                return Written(entry, known=_entry(row).state)
            except msgspec.MsgspecError:
                return Written(entry, error="the journal holds a command of this name that cannot be read")
        return Written(entry)


def _row(entry: Entry) -> tuple[object, ...]:
    fields = msgspec.structs.asdict(entry.state) | {"expires_step": entry.expires_step}
    for name in ("changes", "before"):
        fields[name] = msgspec.json.encode(fields[name]).decode()
    return tuple(fields[name] for name in COLUMNS)


def _trial(row: tuple[str]) -> TrialEntry:
    return msgspec.json.decode(row[0], type=TrialEntry)


def _trial_row(entry: TrialEntry) -> tuple[object, ...]:
    return entry.state.id, entry.state.began_s, msgspec.json.encode(entry).decode()


def _entry(row: tuple[object, ...]) -> Entry:
    return _command(dict(zip(COLUMNS, row, strict=True)))


def _command(fields: dict[str, object]) -> Entry:
    fields = {"reason": "", "asked_s": 0.0, "undoes": 0} | fields  # which earlier releases did not write
    for name in ("changes", "before"):
        fields[name] = msgspec.json.decode(str(fields[name]), type=Changes)
    state = [CommandState.__struct_config__.tag, *(fields[name] for name in CommandState.__struct_fields__)]
    return msgspec.convert({"state": state, "expires_step": fields["expires_step"]}, Entry)
