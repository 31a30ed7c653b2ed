"""Tests of the expert-load history, both at any position of a replay and on a screen that is opened in the middle of a
live run."""

from pathlib import Path

import pytest

from agents.hub.recorder import Limits, Recorder
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Experts, LayerLoad
from agents.recording.reader import Recording
from agents.recording.replay import Replay
from cockpit.data.history.experts import ExpertHistory, Streak
from cockpit.data.sources.detail import DetailReader
from cockpit.data.sources.past_experts import history_at
from cockpit.data.store import Store
from tests.unit.agents.fleet import make_hello, make_summary

DEAD_FROM, EVERY, STEPS = 40, 4, 120


def record(step: int) -> Experts:
    return Experts(step, [LayerLoad(3, [100, 0 if step >= DEAD_FROM else 100, 100], 0)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run with many short segments, in which expert 1 of layer 3 is dead from step DEAD_FROM on."""
    path = tmp_path_factory.mktemp("runs") / "run"
    path.mkdir()
    updates = UpdateLog()
    recorder = Recorder(
        path / "run.db", updates, Limits(segment_bytes=2000, commit_s=0.01, snapshot_multiple=0)
    )
    updates.publish(make_hello(0, 1))
    for step in range(STEPS):
        updates.publish(make_summary(step))
        if step % EVERY == 0:
            updates.publish(record(step))
        recorder.follow()
    recorder.close()
    return path


def since(history: ExpertHistory) -> tuple[int, int | None] | None:
    streak: Streak | None = history.streak(3, 1)
    return (streak.first, streak.before) if streak else None


def test_a_replay_shows_since_when_at_every_position(folder: Path) -> None:
    recording = Recording(folder / "run.db")
    replay = Replay(recording)
    known = ExpertHistory()
    for step, expected in ((100, (40, 36)), (60, (40, 36)), (39, None), (118, (40, 36)), (2, None)):
        replay.seek(recording.at_step(step))
        found = history_at(replay, known)
        assert found is not None
        known = found
        newest = step // EVERY * EVERY
        assert [known.loads[number].first for number in range(len(known.loads))] == [
            *range(0, newest, EVERY)
        ] + ([newest] if replay.state.experts and replay.state.experts.step == newest else [])
        assert since(known) == expected, step
    recording.close()


def test_a_screen_that_is_opened_later_reads_the_recording(folder: Path) -> None:
    store = Store()
    store.apply([make_hello(0, 1), record(STEPS - 4), record(STEPS), record(STEPS + 4)])
    assert since(store.expert_history) == (STEPS - 4, None)
    DetailReader(str(folder))._read_experts(store)
    assert since(store.expert_history) == (DEAD_FROM, DEAD_FROM - EVERY)
    kept = store.expert_history.loads
    assert [kept[number].first for number in range(len(kept))] == [*range(0, STEPS + 5, EVERY)]
