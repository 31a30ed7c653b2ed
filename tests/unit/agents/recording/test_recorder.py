"""The recorder: how old parts of a recording first lose the per-rank records (are thinned) and are then deleted, and
how recording continues after a gap in the updates."""

from copy import copy
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from agents import protocol
from agents.hub import recorder
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Event
from agents.recording.format import OF_A_MOMENT, RecordingError, unpack
from agents.recording.reader import Recording
from agents.recording.replay import Replay
from agents.recording.writer import RecordingWriteError, RecordingWriter
from tests.unit.agents.recorder_run import MakeRun, digest, opened

KEPT = {"Hello", "Board", "Summary", "Event", "Alert", "Gone", "CommandState", "TrialState", "Recalled"}


def test_every_kind_is_kept_or_thinned() -> None:
    assert KEPT | {kind.__name__ for kind in OF_A_MOMENT} == {
        kind.__name__ for kind in get_args(protocol.Update)
    }


def test_segments_are_consecutive_and_any_number_is_found(make_run: MakeRun) -> None:
    run = make_run(segment_bytes=4000)
    run.begin()
    run.train(60)
    replay = opened(run)
    segments = replay.recording.segments()
    assert len(segments) > 5 and not any(segment.thinned for segment in segments)
    for seq in (1, 2, 50, segments[3].seq, segments[3].seq + 1, 300, run.update_log.seq):
        replay.seek(replay.recording.at_seq(seq))
        assert (replay.seq, digest(replay.state)) == (seq, run.states[seq])
    for step in (0, 7, 59):
        replay.seek(replay.recording.at_step(step))
        assert replay.state.summaries[-1].step == step
        assert {record.step for record in replay.state.steps.values()} <= {step, step + 1}
    replay.seek(replay.recording.at_start())
    assert replay.seq == 0 and not replay.state.hellos
    for beyond in (replay.recording.at_seq, replay.recording.at_step):
        with pytest.raises(RecordingError, match=r"holds the (updates 0|steps 0) to .*, not 5000"):
            beyond(5000)


def test_a_resumed_run_is_found_at_its_later_pass(make_run: MakeRun) -> None:
    run = make_run(segment_bytes=2000)
    run.begin()
    run.train(30)
    run.step = 9
    run.train(10)
    newest = run.update_log.seq
    replay = opened(run)
    replay.seek(replay.recording.at_step(15))
    assert [summary.step for summary in replay.state.summaries] == list(range(16))
    assert newest - 30 < replay.seq < newest, "not the first pass of step 15"
    replay.seek(replay.recording.at_step(25))
    assert replay.state.summaries[-1].step == 25, "not reached again, so the earlier value stays"


def test_a_step_before_a_hub_restart_is_found(make_run: MakeRun) -> None:
    before = make_run()
    before.begin()
    before.train(12)
    before.recorder.close()
    after = make_run()
    after.begin()
    after.until(after.written)  # a row that the new hub writes before it knows a step
    after.step = 11
    after.train(8)
    replay = opened(after)
    for step, run in ((5, before), (11, before), (12, after), (15, after)):
        replay.seek(replay.recording.at_step(step))
        assert (replay.epoch, replay.state.summaries[-1].step) == (run.update_log.epoch, step)


def test_old_segments_are_thinned_then_deleted(make_run: MakeRun) -> None:
    run = make_run(segment_bytes=10_000, full_bytes=20_000, thin_bytes=20_000)
    run.begin()
    run.tell(Event(1.0, "info", "hub", "an event of old"))
    for _ in range(40):
        run.train(10)
        run.until(run.written)
    run.until(lambda: sum(segment.thinned for segment in Recording(run.path).segments()) > 5)
    replay = opened(run)
    segments = replay.recording.segments()
    thinned = [segment for segment in segments if segment.thinned]
    assert segments[: len(thinned)] == thinned, "the oldest first"
    whole = segments[len(thinned)]
    assert digest_at(replay, whole.seq) == run.states[whole.seq], (
        "a complete segment begins with a full snapshot"
    )
    middle = thinned[len(thinned) // 2]
    replay.seek(replay.recording.at_seq(middle.seq))
    assert replay.thinned and not replay.state.steps, "no data, rather than old data"
    assert [summary.step for summary in replay.state.summaries] == list(range((middle.step or 0) + 1))
    assert len(replay.state.hellos) == 4 and len(replay.state.events) == 1
    replay.seek(replay.recording.at_end())
    assert digest(replay.state) == run.states[run.update_log.seq]

    again = make_run(segment_bytes=10_000, full_bytes=20_000, thin_bytes=2_000)
    again.train(1)
    again.until(lambda: Recording(run.path).segments()[0].id > segments[0].id)
    again.until(lambda: sum(segment.thinned for segment in Recording(run.path).segments()) < 5)


def test_a_long_curve_is_the_same_at_every_position(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.state.run_state.HISTORY", 16)
    monkeypatch.setattr("agents.state.metric_curves.BUCKETS", 8)
    run = make_run(segment_bytes=10_000, full_bytes=5_000, thin_bytes=1 << 20)
    run.begin()
    curves = {}
    for _ in range(40):
        run.train(10)
        run.until(run.written)
        curves[run.update_log.seq] = (run.step, copy(run.update_log.state.curve))
    run.until(lambda: sum(segment.thinned for segment in Recording(run.path).segments()) > 5)
    replay = opened(run)
    thinned = 0
    for seq, (step, curve) in curves.items():
        replay.seek(replay.recording.at_seq(seq))
        thinned += replay.thinned
        assert replay.state.curve == curve
        newest = range(max(0, step - 15), step + 1)
        assert [summary.step for summary in replay.state.summaries] == list(newest)
        if not replay.thinned:
            assert digest(replay.state) == run.states[seq]
    assert thinned > 10 and curve.width > 16


def digest_at(replay: Replay, seq: int) -> list[bytes]:
    replay.seek(replay.recording.at_seq(seq))
    return digest(replay.state)


def test_a_slow_recorder_has_a_gap_and_then_a_snapshot(make_run: MakeRun) -> None:
    run = make_run(UpdateLog(log_updates=64), queue_bytes=0, commit_s=0.2, gap_interval_s=0.0)
    run.begin()
    run.train(100)  # the thread sleeps after the first updates, and the log keeps only 64
    run.until(lambda: any("has a gap" in text for text in run.events))
    run.train(1)
    run.until(run.written)
    replay = opened(run)
    first, second = replay.recording.segments()
    assert first.seq == 0 and second.seq > 400
    assert digest_at(replay, run.update_log.seq) == digest(run.update_log.state)


def test_a_disk_failure_is_reported_once_and_retried(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    class Counted(RecordingWriter):
        def __init__(self, path: Path, *limits: int) -> None:
            tries.append(path)
            super().__init__(path, *limits)

    monkeypatch.setattr(recorder, "RecordingWriter", Counted)
    monkeypatch.setattr(recorder, "RETRY_S", 0.05)
    (tmp_path / "run.db").mkdir()  # a folder of this name prevents the creation of the database
    run = make_run()
    run.begin()
    run.train(3)
    run.until(lambda: run.events)
    assert (
        "the recording stops: run.db is not a regular file" in run.events[0]
        and "telemetry continues" in run.events[0]
    )
    before = len(tries)
    run.until(lambda: len(tries) > before + 1)
    assert len(run.events) == 1
    (tmp_path / "run.db").rmdir()
    run.until(lambda: len(run.events) > 1)
    run.train(3)
    assert run.events[1] == "the recording continues after a gap"
    replay = opened(run)
    replay.seek(replay.recording.at_end())
    assert digest(replay.state) == digest(run.update_log.state)


def test_a_failed_write_is_not_blamed_on_an_earlier_hub(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction that fails on a full disk leaves an incomplete write-ahead log."""
    opened_files: list[Path] = []

    class Full(RecordingWriter):
        def __init__(self, path: Path, *limits: int) -> None:
            super().__init__(path, *limits)
            opened_files.append(path)
            self.lost = "the last transaction is incomplete" if len(opened_files) > 1 else ""

        def commit(self) -> None:
            if len(opened_files) == 1:
                raise RecordingWriteError("database or disk is full")
            super().commit()

    monkeypatch.setattr(recorder, "RecordingWriter", Full)
    monkeypatch.setattr(recorder, "RETRY_S", 0.05)
    run = make_run()
    run.begin()
    run.train(3)
    run.until(lambda: len(run.events) > 1)
    assert run.events == [
        "the recording stops: database or disk is full; telemetry continues",
        "the recording continues after a gap",
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_thread_is_reported(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SystemExit  # ends the thread without a message

    monkeypatch.setattr(RecordingWriter, "commit", fail)
    run = make_run()
    run.begin()
    run.until(lambda: run.events)
    assert "its thread has failed" in run.events[0]


def test_any_error_is_reported_and_retried(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(recorder, "RETRY_S", 0.05)
    with monkeypatch.context() as failing:
        failing.setattr(RecordingWriter, "commit", fail)
        run = make_run()
        run.begin()
        run.until(lambda: run.events)
        assert "internal error: KeyError('a mistake')" in run.events[0]
    run.until(lambda: "continues after a gap" in run.events[-1])


def test_kinds_of_a_newer_release_are_accepted() -> None:
    newer = msgspec.Raw(msgspec.msgpack.encode(["wonders", 1, {"a": 2}]))
    assert unpack(newer) == protocol.Unknown("wonders")
    with pytest.raises(RecordingError, match="cannot be read"):
        unpack(msgspec.Raw(msgspec.msgpack.encode(["board", "x"])))
    # Frequent records of ranks are recorded as received, before they are decoded.
    malformed = unpack(msgspec.Raw(msgspec.msgpack.encode(["step", "x"])))
    assert isinstance(malformed, protocol.Unknown) and "length 9, got 2" in malformed.why
