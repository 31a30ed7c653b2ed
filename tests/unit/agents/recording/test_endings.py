"""Tests what a starting hub reads from a recording: the final states of earlier hub processes; a hub process is skipped
if the last segment that it recorded contains no hello of the leader rank."""

import math
import sqlite3
import threading
from pathlib import Path

import msgspec
import pytest

from agents.protocol import Event, Update, codec
from agents.recording import endings as reading
from agents.recording.endings import Ending, endings
from agents.recording.format import Batch, NothingRecordedError, RecordingError, pack_row
from agents.recording.writer import RecordingWriter
from tests.unit.agents.fleet import make_hello, make_summary


def tape(path: Path, *starts: tuple[str, list[Update]]) -> Path:
    """Write a recording made by several hub processes. Each item of `starts` describes one of these processes: its
    epoch (a name that only this process uses) and the snapshot of the run's state that it wrote first."""
    told = RecordingWriter(path, 1 << 30, 1 << 30)
    for epoch, updates in starts:
        told.begin(epoch, 0, 0.0, None, False, list(map(codec.pack, updates)))
        told.commit()
    told.close()
    return path


def read(path: Path, epoch: str = "now") -> list[Ending]:
    return list(endings(path, epoch, threading.Event()))


def curve(*numbers: int) -> list[Update]:
    return [make_hello(0, 1), *map(make_summary, numbers)]


def test_the_newest_hub_starts_with_a_leader_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    alone: list[Update] = [Event(0.0, "info", "hub", "no writer has opened the pipe")]
    tape(
        path, ("a", curve(1, 2)), ("b", alone), ("c", curve(3)), ("d", [make_hello(1, 2)]), ("now", curve(9))
    )
    assert [[one.step for one in ending.summaries] for ending in read(path)] == [[3], [1, 2]]
    tape(path, *((f"later {n}", curve(n)) for n in range(10)))
    assert [ending.summaries[0].step for ending in read(path)] == [9, 8, 7, 6]


def test_a_missing_recording_is_not_an_error(tmp_path: Path) -> None:
    with pytest.raises(NothingRecordedError):
        read(tmp_path / "run.db")
    assert read(tape(tmp_path / "run.db", ("now", curve(1)))) == []


def of(*updates: object) -> bytes:
    packed = [msgspec.Raw(msgspec.msgpack.encode(update)) for update in updates]
    return pack_row([Batch(0.0, 0, packed)])


SMALL = ["event", 0.0, "info", "hub", "x" * 4096]


@pytest.mark.parametrize(
    ("statement", "value", "why"),
    [
        ("UPDATE segments SET snapshot = ?", b"no zlib", "cannot be read"),
        ("UPDATE segments SET snapshot = ?", of(b"\0" * (2 << 20)), "truncated, or has more than 1 MiB"),
        ("UPDATE segments SET snapshot = ?", b"\0" * (2 << 20), "too big"),
        ("UPDATE segments SET snapshot = ?", 7, "cannot be read"),
        ("UPDATE segments SET snapshot = ?", of(7), "cannot be read"),
        ("UPDATE segments SET snapshot = ?", of(["summary", "x"]), "cannot be read"),
        ("UPDATE segments SET snapshot = ?", of(["event", math.nan, *SMALL[2:]]), "cannot be read"),
        ("UPDATE segments SET snapshot = ?", of(*[SMALL] * 100), "more than 0 MiB of history"),
        ("INSERT INTO feed SELECT 1, 1, 1, 1, 0.0, 1, NULL, ?", b"no zlib", "cannot be read"),
        ("INSERT INTO feed SELECT 1, 1, 1, 1, 0.0, 1, NULL, ?", "text", "cannot be read"),
    ],
    ids=range(10),
)
def test_an_invalid_recording_gets_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, value: object, why: str
) -> None:
    monkeypatch.setattr(reading, "ROW_BYTES", 1 << 20)
    monkeypatch.setattr(reading, "KEPT_BYTES", 100_000)
    path = tape(tmp_path / "run.db", ("a", curve(1)))
    with sqlite3.connect(path) as db:
        db.execute(statement, (value,))
    db.close()
    with pytest.raises(RecordingError, match=why) as error:
        read(path)
    assert "\n" not in str(error.value)


def test_reading_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tape(tmp_path / "run.db", ("a", curve(1)))
    monkeypatch.setattr(reading, "MOST_S", -1.0)
    with pytest.raises(RecordingError, match=r"to read|interrupted"):
        read(path)
