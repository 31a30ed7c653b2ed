"""The file of the command journal, an SQLite database in WAL mode with `synchronous=FULL`.

The journal is a separate file, so that writing the recording never blocks the journal. If the journal file is removed,
it is restored from the open connection.
"""

import contextlib
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from agents.protocol import CommandState
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
    lost_rows,
    read_commands,
    readable_rows,
    row_of,
    rows,
    tables,
    trial_of,
    trial_row,
)
from agents.recording.database import Database, OpenFile, check_files, put_back, readable, torn

PRUNE = (
    "DELETE FROM commands WHERE revision = 0 AND rowid NOT IN "
    "(SELECT rowid FROM commands WHERE revision = 0 ORDER BY rowid DESC LIMIT ?)"
)
PRUNE_TRIALS = "DELETE FROM trials WHERE rowid NOT IN (SELECT rowid FROM trials ORDER BY rowid DESC LIMIT ?)"
NEWEST_LOADED = 1024  # number of commands loaded at start, in addition to all unsettled commands
# Maximum number of rejected proposals kept, so that repeated bad proposals cannot fill the disk.
REFUSED_KEPT = 4096
TRIALS_LOADED = 64
TRIALS_KEPT = 4096
PRUNE_PERIOD = 1024  # commands
BUSY_S = 10.0  # maximum wait for another process that uses the file, such as a backup
OPEN_S = 1.0  # maximum wait when the file is opened; shorter, because the hub waits for the opening


class Written(Struct, frozen=True):
    """The result of writing a new command to the journal. The command is on disk, unless `error` is set or the journal
    already had a command with the same id (`known`).
    """

    entry: Entry
    error: str = ""
    known: CommandState | None = None


@dataclass(frozen=True)
class Found:
    """The commands and trials that were read from the journal file when it was opened, oldest first."""

    last_revision: int = 0
    entries: list[Entry] = field(default_factory=list)  # the newest commands and all unsettled ones
    trials: list[TrialEntry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # one sentence per unreadable part


class JournalFile:
    """The open journal file. `found`: the commands and trials that were read when the file was opened. The constructor
    raises sqlite3.Error or msgspec.MsgspecError if the file cannot be opened.

    `earlier`: the file in which an earlier release kept the commands of this run.
    """

    def __init__(self, path: Path, earlier: Path | None = None) -> None:
        self._path = path
        self._inserted = 0  # since the last pruning
        self._db = self._connect(OPEN_S)
        try:
            self.found = self._prepare(earlier)
        except BaseException:
            self._db.close()
            raise
        self._open_file = OpenFile(path)

    @property
    def removed(self) -> bool:
        """Whether the journal file has been removed or replaced since it was opened."""
        return self._open_file.removed

    def put_back(self) -> None:
        """Restore the journal file after it has been removed. Raises sqlite3.Error or OSError if the file cannot be
        restored."""
        put_back(self._db, self._path)
        self._db = self._connect(BUSY_S)
        tables(self._db)  # reads from the database, so that SQLite opens its log and index
        self._open_file = OpenFile(self._path)

    def write(
        self, new: Sequence[Entry], states: Iterable[Entry], trials: Iterable[TrialEntry]
    ) -> list[Written]:
        """Write new commands, new states of commands, and trials in one transaction. If an error is raised, nothing is
        written.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(UPSERT, map(row_of, states))
            self._db.executemany(PUT_TRIAL, map(trial_row, trials))
            written = [self._insert(entry) for entry in new]
            self._inserted += len(new)
            if self._inserted >= PRUNE_PERIOD:  # prune regularly, because a hub may run for months
                self._inserted = 0
                self._prune()
            self._db.execute("COMMIT")
        except Exception:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        return written

    def close(self) -> None:
        self._db.close()

    def _connect(self, timeout_s: float) -> sqlite3.Connection:
        check_files(self._path, written=True)
        db = sqlite3.connect(
            self._path, isolation_level=None, check_same_thread=False, timeout=timeout_s, factory=Database
        )
        db.text_factory = readable
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _prepare(self, earlier: Path | None) -> Found:
        """Create or update the tables, and load the newest rows."""
        lost = torn(self._db, self._path)
        known = tables(self._db)
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute(SCHEMA)
        self._db.execute(TRIALS)
        for table, columns in LATER.items():
            there = {row[1] for row in self._db.execute(f"PRAGMA table_info({table})")}
            for column in columns.keys() - there:
                self._db.execute(f"ALTER TABLE {table} ADD COLUMN {column} {columns[column]}")
        problems = [lost] if lost else []
        if "commands" not in known and earlier:
            problems += self._import_earlier(earlier)
        self._prune()
        self._db.execute("COMMIT")
        found = self._load(problems)
        self._db.execute(f"PRAGMA busy_timeout={int(1000 * BUSY_S)}")
        return found

    def _import_earlier(self, earlier: Path) -> list[str]:
        """Copy the journal of an earlier release. Returns a one-sentence message for each part of the file that cannot
        be read."""
        journalled = read_commands(earlier)
        self._db.executemany(INSERT, map(row_of, journalled.commands))
        self._db.executemany(PUT_TRIAL, map(trial_row, journalled.trials))
        return journalled.damage

    def _load(self, problems: list[str]) -> Found:
        newest = self._db.execute("SELECT COALESCE(MAX(revision), 0) FROM commands").fetchone()[0]
        problems = [*problems, *lost_rows(self._db, self._path)]
        last = msgspec.convert(newest, Revision)  # SQLite does not enforce column types
        loaded = (
            "commands WHERE state = 'accepted' OR rowid IN "
            f"(SELECT rowid FROM commands ORDER BY rowid DESC LIMIT {NEWEST_LOADED})"
        )
        unreadable: list[str] = []
        entries = list(readable_rows(rows(self._db, loaded), command_of, unreadable))
        loaded = f"trials WHERE rowid IN (SELECT rowid FROM trials ORDER BY rowid DESC LIMIT {TRIALS_LOADED})"
        trials = list(readable_rows(rows(self._db, loaded), trial_of, unreadable))
        if unreadable:
            cannot = f"rows of the journal that cannot be read and are left out: {len(unreadable)}"
            problems = [*problems, cannot]
        return Found(last, entries, trials, problems)

    def _insert(self, entry: Entry) -> Written:
        try:
            self._db.execute(INSERT, row_of(entry))
        except sqlite3.IntegrityError:
            known = rows(self._db, "commands WHERE id = ?", entry.state.id)
            try:
                return Written(entry, known=command_of(next(known)).state)
            except (msgspec.MsgspecError, StopIteration):
                return Written(entry, error="the journal has a command with this id that cannot be read")
        return Written(entry)

    def _prune(self) -> None:
        """Delete the oldest trials and the oldest rejected proposals."""
        self._db.execute(PRUNE, (REFUSED_KEPT,))
        self._db.execute(PRUNE_TRIALS, (TRIALS_KEPT,))
