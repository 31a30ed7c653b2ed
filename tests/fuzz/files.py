"""Fuzz targets for files: run folders and key folders, which a process reads to connect to a run, and recordings, which
a process reads to replay a run."""

import contextlib
import itertools
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgpack

from agents.hub.commands.journal import Journal
from agents.recording import format
from agents.recording.commands import SCHEMA
from agents.recording.format import RecordingError
from agents.recording.reader import Recording
from agents.recording.replay import Replay
from agents.rundir import runs
from agents.rundir.failure_file import FAILURE_FILE, last_failure
from agents.rundir.hub_file import HUB_FILE
from agents.rundir.runs import RunError
from agents.transport.curve_keys import KeyStore, load_key
from agents.transport.roles import Role

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a file system in memory


class Files:
    """The fuzz target for the files in a run folder and in a key folder."""

    def __init__(self) -> None:
        self.fed = 0
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=FAST))
        (self._folder / "run").mkdir()
        self._keys = KeyStore(self._folder / "keys")
        self._key = self._keys.make("mine", Role.VIEWER)

    def feed(self, data: bytes) -> None:
        kind, data = data[:1], data[1:]
        self.fed += 1
        reader, path = {
            b"h": (self._hub, self._folder / "run" / HUB_FILE),
            b"f": (self._failure, self._folder / "run" / FAILURE_FILE),
            b"k": (self._one_key, self._key),
            b"l": (self._list, self._folder / "keys" / "allowed.json"),
            b"r": (self._rows, self._folder / "run" / runs.RECORD_FILE),
            b"w": (self._recording, self._folder / "run" / runs.RECORD_FILE),
        }.get(kind, (self._journal, self._folder / "run" / runs.RECORD_FILE))
        path.write_bytes(data)
        try:
            reader()
        except (RunError, RecordingError) as error:
            assert "\n" not in str(error), f"not a sentence: {error}"

    def _hub(self) -> None:
        (self._folder / "run" / FAILURE_FILE).unlink(missing_ok=True)
        runs.newest_live(self._folder)
        runs.list_runs(self._folder)
        runs.resolve("run", self._folder)

    def _failure(self) -> None:
        (self._folder / "run" / HUB_FILE).unlink(missing_ok=True)
        last_failure(self._folder / "run")
        runs.resolve("run", self._folder)

    def _one_key(self) -> None:
        load_key(self._key)

    def _list(self) -> None:
        self._keys.listed()
        list(self._keys.files(list(Role)))

    def _rows(self) -> None:
        """A journal that SQLite can read, with arbitrary rows."""
        self._fill(SCHEMA, ("commands",))
        self._journal()

    def _recording(self) -> None:
        """A recording that SQLite can read, with arbitrary segments and rows."""
        opened = Recording(self._fill(format.SCHEMA, ("segments", "feed")))
        try:
            opened.segments()
            opened.span()
            replay = Replay(opened)
            for place in (opened.at_end(), opened.at_time(5.0), opened.at_seq(3), opened.at_step(2)):
                replay.seek(place)
                replay.forward(lambda _: False)
        finally:
            opened.close()

    def _fill(self, schema: str, tables: Iterable[str]) -> Path:
        """Create a database with the schema `schema`, and insert the input's rows: the first one into the first of
        `tables`, the second one into the second, and so on, then again from the first table."""
        path = self._folder / "run" / runs.RECORD_FILE
        data = path.read_bytes()
        for beside in ("", "-wal", "-shm"):
            path.with_name(path.name + beside).unlink(missing_ok=True)
        db = sqlite3.connect(path)
        db.executescript(schema)
        with contextlib.suppress(
            ValueError, TypeError, msgpack.UnpackException, sqlite3.Error, OverflowError
        ):
            for row, table in zip(msgpack.unpackb(data, strict_map_key=False), itertools.cycle(tables)):
                names = [found[1] for found in db.execute(f"PRAGMA table_info({table})")]
                db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", row)
        db.commit()
        db.close()
        return path

    def _journal(self) -> None:
        path = self._folder / "run" / runs.RECORD_FILE
        for beside in ("-wal", "-shm"):
            path.with_name(path.name + beside).unlink(missing_ok=True)
        journal = Journal(path)
        assert "\n" not in journal.failure, journal.failure
        journal.close()
        for descriptor in (journal.wake_fd, journal._wake):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def close(self) -> None:
        shutil.rmtree(self._folder)
