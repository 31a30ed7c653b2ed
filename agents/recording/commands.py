"""The tables of commands and trials in `commands.db`: conversion to and from rows, and reading all rows.

Each row has a checksum, because SQLite itself stores none and would not detect a flipped bit in a value. A damaged page
can also make whole rows unreadable; comparing the table with its index finds these rows.
"""

import contextlib
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from agents.protocol import Changes, CommandState, TrialState
from agents.recording.database import open_to_read

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS commands (
    id           TEXT PRIMARY KEY,   -- chosen by the client
    revision     INTEGER NOT NULL,   -- 0: refused before it got one
    state        TEXT NOT NULL,      -- accepted | applied | rejected | expired | rolled_back
    changes      TEXT NOT NULL,      -- JSON, knob -> value
    before       TEXT NOT NULL,      -- JSON, knob -> value
    who          TEXT NOT NULL,
    time_s       REAL NOT NULL,      -- time of this state
    acks         INTEGER NOT NULL,
    world        INTEGER NOT NULL,
    applied_step INTEGER,
    why          TEXT NOT NULL,
    expires_step INTEGER,
    reason       TEXT NOT NULL DEFAULT '',   -- the operator's note
    asked_s      REAL NOT NULL DEFAULT 0,
    undoes       INTEGER NOT NULL DEFAULT 0, -- the revision that this one reverts
    failed       INTEGER NOT NULL DEFAULT 0, -- ranks that report that it is not in force
    checksum     INTEGER                     -- of all columns above; null in rows of an earlier release
)
"""
TRIALS: Final = """
CREATE TABLE IF NOT EXISTS trials (
    id       TEXT PRIMARY KEY,  -- chosen by the client
    began_s  REAL NOT NULL,
    entry    TEXT NOT NULL,     -- JSON: the state, and the step times before
    checksum INTEGER            -- of the entry
)
"""
LATER: Final = {  # for each table, the columns that files of earlier releases lack
    "commands": {
        "reason": "TEXT NOT NULL DEFAULT ''",
        "asked_s": "REAL NOT NULL DEFAULT 0",
        "undoes": "INTEGER NOT NULL DEFAULT 0",
        "failed": "INTEGER NOT NULL DEFAULT 0",
        "checksum": "INTEGER",
    },
    "trials": {"checksum": "INTEGER"},
}
COLUMNS: Final = (*CommandState.__struct_fields__, "expires_step", "checksum")
# Columns in the checksum; later columns are not included, or rows of older releases would look damaged.
SUMMED: Final = (
    *("id", "revision", "state", "changes", "before", "who", "time_s", "acks", "world"),
    *("applied_step", "why", "expires_step", "reason", "asked_s", "undoes", "failed"),
)
INSERT: Final = f"INSERT INTO commands ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
# A late rejection of an old id must not replace the result of the command.
UPSERT: Final = (
    f"{INSERT} ON CONFLICT (id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in COLUMNS)} "
    "WHERE commands.revision = excluded.revision"
)
PUT_TRIAL: Final = "INSERT OR REPLACE INTO trials (id, began_s, entry, checksum) VALUES (?, ?, ?, ?)"

Row = tuple[object, ...]
T = TypeVar("T")


class Entry(Struct, frozen=True):
    """A command (a proposed change of knobs, or an action) as the journal stores it."""

    state: CommandState
    expires_step: int | None = None


class TrialEntry(Struct, frozen=True):
    """A trial of knob values as the journal stores it."""

    state: TrialState
    times: list[float] = []  # step times in ms before the change
    others: Changes = {}  # values of the other knobs before the change
    attempts: int = 1  # number of attempts to revert the value


@dataclass
class Journalled:
    """All commands and trials of a run, oldest first. `damage`: one sentence for each problem that was found, such as
    missing rows of a table."""

    commands: list[Entry] = field(default_factory=list)
    trials: list[TrialEntry] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)


def read_commands(path: Path) -> Journalled:
    """Read the file without changing it. If the file does not exist, there are no commands."""
    found = Journalled()
    if not path.exists():
        return found
    try:
        db, lost = open_to_read(path)
    except (sqlite3.Error, OSError) as error:
        found.damage.append(f"{path} cannot be read: {sentence(error)}")
        return found
    unreadable: list[str] = []
    with contextlib.closing(db):
        found.damage += [lost] if lost else []
        try:
            known = tables(db)
            if "commands" in known:
                found.commands.extend(readable_rows(rows(db, "commands"), command_of, unreadable))
            if "trials" in known:
                found.trials.extend(readable_rows(rows(db, "trials"), trial_of, unreadable))
            found.damage += lost_rows(db, path)
        except sqlite3.Error as error:
            found.damage.append(f"some commands in {path} cannot be read: {sentence(error)}")
    if unreadable:
        found.damage.append(f"{path} is damaged; commands and trials left out: {len(unreadable)}")
    return found


def lost_rows(db: sqlite3.Connection, path: Path) -> list[str]:
    """A one-sentence message for each table with missing rows, or one message if the tables themselves are missing.
    Raises sqlite3.Error if the file cannot be read."""
    damage = []
    known = tables(db)
    if not known and db.execute("PRAGMA page_count").fetchone()[0] > 1:
        damage.append(f"{path} is damaged: its tables are missing")
    for table in sorted({"commands", "trials"} & known):
        ids = f"SELECT id FROM {table}"
        by_index = f"{ids} INDEXED BY sqlite_autoindex_{table}_1 EXCEPT {ids} NOT INDEXED"
        if number := len(db.execute(by_index).fetchall()):
            damage.append(f"{path} is damaged; missing {table}: {number}")
    return damage


def readable_rows(
    found: Iterator[dict[str, object]], read: Callable[[dict[str, object]], T], unreadable: list[str]
) -> Iterator[T]:
    """Yields the rows that can be read; for each other row, adds the error message to `unreadable`."""
    for row in found:
        try:
            yield read(row)
        except msgspec.MsgspecError as error:
            unreadable.append(str(error))


def sentence(error: Exception) -> str:
    """The error message as one line; messages of SQLite may have several lines."""
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


def tables(db: sqlite3.Connection) -> set[str]:
    return {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def rows(db: sqlite3.Connection, table: str, *values: object) -> Iterator[dict[str, object]]:
    """Rows of `table`, or `table WHERE ...`, as dicts, oldest first. Files of earlier releases lack some columns."""
    found = db.execute(f"SELECT * FROM {table} ORDER BY rowid", values)
    names = [column[0] for column in found.description]
    return (dict(zip(names, row, strict=True)) for row in found)


def row_of(entry: Entry) -> Row:
    """A command as a row with the columns in `COLUMNS`."""
    fields = msgspec.structs.asdict(entry.state) | {"expires_step": entry.expires_step}
    for name in ("changes", "before"):
        fields[name] = msgspec.json.encode(fields[name]).decode()
    for name in ("time_s", "asked_s"):
        fields[name] = float(fields[name])  # converted, because SQLite returns these columns as float
    fields["checksum"] = _checksum(fields)
    return tuple(fields[name] for name in COLUMNS)


def trial_row(entry: TrialEntry) -> Row:
    """A trial as a row for the statement `PUT_TRIAL`."""
    text = msgspec.json.encode(entry)
    return entry.state.id, entry.state.began_s, text.decode(), zlib.crc32(text)


def command_of(row: dict[str, object]) -> Entry:
    """Convert a row to a command. Raises MsgspecError if the row is damaged or not from a journal."""
    # Rows of earlier releases lack these columns.
    fields = {
        "reason": "",
        "asked_s": 0.0,
        "undoes": 0,
        "failed": 0,
    } | row
    if fields.get("checksum") not in (None, _checksum(fields)):
        raise msgspec.ValidationError("its checksum differs")
    for name in ("changes", "before"):
        fields[name] = msgspec.json.decode(str(fields[name]), type=Changes)
    state = [
        CommandState.__struct_config__.tag,
        *(fields.get(name) for name in CommandState.__struct_fields__),
    ]
    return msgspec.convert({"state": state, "expires_step": fields.get("expires_step")}, Entry)


def trial_of(row: dict[str, object]) -> TrialEntry:
    """Convert a row to a trial. Raises MsgspecError if the row is damaged or not from a journal."""
    text = str(row.get("entry"))
    if row.get("checksum") not in (None, zlib.crc32(text.encode(errors="replace"))):
        raise msgspec.ValidationError("its checksum differs")
    return msgspec.json.decode(text, type=TrialEntry)


def _checksum(fields: dict[str, object]) -> int:
    return zlib.crc32(repr([fields.get(name) for name in SUMMED]).encode(errors="replace"))
