"""Recordings that are damaged or removed, and files that are not recordings."""

import random
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agents.protocol import Summary
from agents.recording.format import ROW_COLUMNS, SEGMENT_COLUMNS, RecordingError, pack_row, unpack_row
from agents.recording.reader import Recording
from agents.recording.replay import Replay
from tests.unit.agents.recorder_run import MakeRun, opened


def test_a_damaged_segment_is_deleted_instead_of_thinned(make_run: MakeRun) -> None:
    run = make_run(segment_bytes=10_000, full_bytes=10**9)
    run.begin()
    run.train(100)
    run.recorder.close()
    with sqlite3.connect(run.path) as db:
        db.execute("UPDATE feed SET data = x'00' WHERE segment = 1")
    again = make_run(segment_bytes=10_000, full_bytes=1)
    again.train(1)
    again.until(lambda: sum(not one.thinned for one in Recording(run.path).segments()) == 1)
    segments = Recording(run.path).segments()
    assert segments[0].id == 2 and segments[0].thinned and not again.events


def test_a_removed_recording_is_restored(make_run: MakeRun) -> None:
    run = make_run()
    run.begin()
    run.train(5)
    run.until(run.written)
    for beside in ("", "-wal", "-shm"):
        run.path.with_name(f"run.db{beside}").unlink()
    run.until(lambda: run.path.exists())
    run.train(5)
    run.until(lambda: any("removed; it is restored" in event.text for event in run.update_log.state.events))
    run.until(run.written)
    run.recorder.close()
    replay = opened(run)
    assert replay.recording.segments()[0].seq == 0, "earlier records are present too"
    replay.seek(replay.recording.at_end())
    assert [summary.step for summary in replay.state.summaries] == list(range(10))


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        (
            "UPDATE segments SET wire = 99",
            "run.db: the recording has protocol version 99, this release reads 1",
        ),
        ("DELETE FROM segments", "belong to no segment"),
        ("DROP TABLE segments", "no such table"),
    ],
)
def test_a_damaged_recording_gets_one_sentence(make_run: MakeRun, statement: str, sentence: str) -> None:
    run = make_run()
    run.begin()
    run.train(5)
    run.recorder.close()
    with sqlite3.connect(run.path) as db:
        db.execute(statement)
    with pytest.raises(RecordingError, match=sentence):
        replay = Replay(Recording(run.path))
        replay.seek(replay.recording.at_end())


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE feed SET data = x'ff00' WHERE id = 3", "the updates .* cannot be read: a row"),
        ("UPDATE feed SET data = substr(data, 1, 40) WHERE id = 3", "truncated"),
        ("UPDATE feed SET id = 1000 WHERE id = 3", "the updates .* are missing"),
        ("UPDATE feed SET segment = 99 WHERE id = 3", "the updates .* are missing"),
        ("DELETE FROM feed WHERE id = 3", "the updates .* are missing"),
        (
            "UPDATE segments SET snapshot = x'789c010000ffff00000001'",
            "the state at update 0 of .* cannot be read",
        ),
    ],
)
def test_damage_is_reported_and_the_rest_is_read(make_run: MakeRun, statement: str, sentence: str) -> None:
    run = make_run()
    run.begin()
    for _ in range(6):
        run.train(5)
        run.until(run.written)
    run.recorder.close()
    last = run.update_log.seq
    with sqlite3.connect(run.path) as db:
        assert db.execute("SELECT COUNT(*) FROM feed").fetchone()[0] > 5
        db.execute(statement)
    replay = opened(run)
    replay.seek(replay.recording.at_end())
    said, *_ = replay.recording.damage
    assert re.search(sentence, said), said
    assert replay.seq == last and len(replay.state.summaries) >= 20


SEGMENTS = ("wire", "epoch", "seq", "time_s", "step", "follows", "thinned")
ROWS = ("segment", "first", "last", "time_s", "step")


@pytest.fixture
def recorded(make_run: MakeRun) -> Path:
    """A recording of several segments with several rows each."""
    run = make_run(segment_bytes=4000)
    run.begin()
    for _ in range(12):
        run.train(2)
        run.until(run.written)
    run.recorder.close()
    return run.path


def damage_of(path: Path) -> str:
    with closing(Recording(path)) as recording:
        list(recording.moments())
        return "\n".join(recording.damage)


def flip_page(path: Path, name: str, offset: int, bits: int) -> None:
    """Flip bits of a byte in the root page of a table or an index."""
    with closing(sqlite3.connect(path)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    data = bytearray(path.read_bytes())
    data[(page - 1) * size + offset] ^= bits
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("table", "column"), [*(("segments", name) for name in SEGMENTS), *(("feed", name) for name in ROWS)]
)
@pytest.mark.parametrize("value", ["{} + 1", "{} - 1e300", "x'00'"])
def test_a_changed_column_is_reported(recorded: Path, table: str, column: str, value: str) -> None:
    assert not damage_of(recorded)
    with sqlite3.connect(recorded) as db:
        db.execute(f"UPDATE {table} SET {column} = {value.format(column)} WHERE id = 2")
    assert re.search("damaged|are missing", damage_of(recorded))  # missing, if the table and its index agree


def test_a_changed_column_is_reported_where_a_position_is_searched(recorded: Path) -> None:
    with sqlite3.connect(recorded) as db:
        db.execute("UPDATE feed SET step = step + 1 WHERE id = 2")
    with closing(Recording(recorded)) as recording:
        recording.at_step(20)
        assert re.search("a position may be wrong: its columns are damaged", recording.damage[0])


def test_a_position_is_found_although_a_page_is_damaged(make_run: MakeRun) -> None:
    """SQLite cannot search a table that has an unreadable page; the reader then finds the position in the rows that it
    can still read."""
    run = make_run(segment_bytes=4000)
    run.begin()
    for _ in range(24):
        run.train(2)
        run.until(run.written)
    run.recorder.close()
    recorded = run.path
    with closing(Recording(recorded)) as recording:
        steps = {
            moment.update.step: moment.seq
            for moment in recording.moments()
            if isinstance(moment.update, Summary)
        }
    with closing(sqlite3.connect(recorded)) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'feed'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    data = bytearray(recorded.read_bytes())
    start = (root - 1) * size
    assert data[start] == 5, "the root is not an inner page"
    last_leaf = int.from_bytes(data[start + 8 : start + 12], "big")
    data[(last_leaf - 1) * size : last_leaf * size] = random.Random(1).randbytes(size)
    recorded.write_bytes(data)
    with closing(Recording(recorded)) as recording:
        replay = Replay(recording)
        for step in (3, 7):
            replay.seek(recording.at_step(step))
            assert replay.state.summaries[-1].step == step and replay.seq == steps[step]
        replay.seek(recording.at_seq(steps[5]))
        assert replay.seq == steps[5]
        assert any("a position may be wrong" in text for text in recording.damage)
        with pytest.raises(RecordingError, match=r"steps from 0 to .* can be read, not 500"):
            recording.at_step(500)


@pytest.mark.parametrize("table", ["segments", "feed"])
def test_an_impossible_time_is_reported_without_a_checksum(recorded: Path, table: str) -> None:
    with sqlite3.connect(recorded) as db:
        db.execute(
            f"UPDATE {table} SET checksum = NULL, time_s = 1e300 WHERE id = (SELECT MAX(id) FROM {table})"
        )
    assert "cannot be read" in damage_of(recorded)


def test_the_columns_of_the_tests_are_all_columns() -> None:
    assert f"id, {', '.join(SEGMENTS)}" == SEGMENT_COLUMNS and ", ".join(ROWS) == ROW_COLUMNS


@pytest.mark.parametrize("table", ["segments", "feed"])
@pytest.mark.parametrize("where", ["MIN", "MAX"])
def test_a_row_that_only_the_index_has_is_reported(recorded: Path, table: str, where: str) -> None:
    """Damage to a page of the table can remove any row of this page but leave the row in the index. The test therefore
    deletes a row from the table but not from the table's index."""
    index = {"segments": "segments_by_epoch", "feed": "feed_by_segment"}[table]
    with closing(sqlite3.connect(recorded, isolation_level=None)) as db:
        (definition,) = db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (index,)).fetchone()
        db.execute("PRAGMA writable_schema = ON")
        row = db.execute("SELECT * FROM sqlite_master WHERE name = ?", (index,)).fetchone()
        db.execute("DELETE FROM sqlite_master WHERE name = ?", (index,))
        db.execute("PRAGMA writable_schema = RESET")
    with closing(sqlite3.connect(recorded, isolation_level=None)) as db:
        db.execute(f"DELETE FROM {table} WHERE id = (SELECT {where}(id) FROM {table})")
        db.execute("PRAGMA writable_schema = ON")
        db.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", row)
        db.execute("PRAGMA writable_schema = RESET")
    assert definition == row[-1] and re.search("missing|not in the file", damage_of(recorded))


def test_a_table_that_loses_its_last_row_is_reported(make_run: MakeRun) -> None:
    run = make_run()
    run.begin()
    run.train(1)
    run.until(run.written)
    run.train(1)
    run.recorder.close()
    with sqlite3.connect(run.path) as db:
        (count,) = db.execute("SELECT COUNT(*) FROM feed").fetchone()
    flip_page(run.path, "feed", 4, count ^ (count - 1))  # the number of the page's rows
    assert "is not in the file" in damage_of(run.path)


def test_rows_are_read_without_a_damaged_index(recorded: Path) -> None:
    with closing(Recording(recorded)) as recording:
        whole = list(recording.moments())
    flip_page(recorded, "feed_by_segment", 4, 0xFF)  # the number of its entries
    with closing(Recording(recorded)) as recording:
        assert [one.seq for one in recording.moments()] == [one.seq for one in whole]


def test_a_recording_of_an_earlier_release_is_read_and_continued(make_run: MakeRun) -> None:
    run = make_run(segment_bytes=4000)
    run.begin()
    run.train(10)
    run.recorder.close()
    with sqlite3.connect(run.path) as db:
        db.executescript(
            "DROP INDEX segments_by_epoch; ALTER TABLE segments DROP COLUMN checksum; "
            "ALTER TABLE feed DROP COLUMN checksum"
        )
    with closing(Recording(run.path)) as recording:
        assert recording.span().last_seq == run.update_log.seq
    assert not damage_of(run.path)
    again = make_run(segment_bytes=4000)
    again.begin()
    again.train(10)
    again.recorder.close()
    assert not damage_of(run.path)
    with sqlite3.connect(run.path) as db:
        db.execute("UPDATE feed SET step = step + 1 WHERE id = (SELECT MAX(id) FROM feed)")
    assert "damaged" in damage_of(run.path)


def test_thinned_segments_have_checksums(make_run: MakeRun) -> None:
    run = make_run(segment_bytes=4000, full_bytes=4000, thin_bytes=10**9)
    run.begin()
    for _ in range(20):
        run.train(5)
        run.until(run.written)
    run.until(lambda: sum(one.thinned for one in Recording(run.path).segments()) > 3)
    run.recorder.close()
    assert not damage_of(run.path)
    with sqlite3.connect(run.path) as db:
        for table in ("segments", "feed"):
            assert db.execute(f"SELECT COUNT(*) FROM {table} WHERE checksum IS NULL").fetchone() == (0,)


def test_paths_that_are_not_recordings(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="there is no recording"):
        Recording(tmp_path / "run.db")
    (tmp_path / "run.db").write_bytes(b"x" * 4096)
    with pytest.raises(RecordingError, match="file is not a database"):
        Recording(tmp_path / "run.db")
    with pytest.raises(RecordingError, match="cannot be read"):
        unpack_row(pack_row([])[:-1] + b"x")
