"""The recording is damaged, removed, or not a recording at all."""

import re
import sqlite3
from pathlib import Path

import pytest

from agents.recording.format import RecordingError, pack_row, unpack_row
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
        ("UPDATE segments SET wire = 99", "protocol version 99"),
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


def test_paths_that_are_not_recordings(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="there is no recording"):
        Recording(tmp_path / "run.db")
    (tmp_path / "run.db").write_bytes(b"x" * 4096)
    with pytest.raises(RecordingError, match="file is not a database"):
        Recording(tmp_path / "run.db")
    with pytest.raises(RecordingError, match="cannot be read"):
        unpack_row(pack_row([])[:-1] + b"x")
