"""The replay of a recorded run: its playback keys, and the line that shows the position in the recording."""

import time
from pathlib import Path

import pytest
from msgspec import structs

from agents.hub.recorder import Limits, Recorder
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Preview, Propose
from agents.recording.reader import Recording
from cockpit.data.sources.playback import Playback
from cockpit.data.sources.source import ViewerError
from cockpit.tui.dialogs.board import BoardScreen
from cockpit.tui.replay import ReplayApp
from tests.screens.driver import shown, until
from tests.screens.fake_run import FakeRun

# one worker runs all of these tests, because they share a fixture
pytestmark = pytest.mark.xdist_group("replay")

STEPS = 40


@pytest.fixture(scope="module")
def run_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of a run of 40 steps, one every half second on the hub's clock."""
    path = tmp_path_factory.mktemp("run") / "run.db"
    sequence, run = UpdateLog(), FakeRun()
    recorder = Recorder(path, sequence, Limits(segment_bytes=40_000, commit_s=0.01, snapshot_multiple=0))
    now = time.time()
    clock = pytest.MonkeyPatch()
    for update in run.begin():
        sequence.publish(update)
    for step in range(STEPS):
        clock.setattr("agents.hub.recorder.time.time", lambda step=step: now + step / 2)
        for update in run.step(step):
            sequence.publish(update)
        recorder.follow()
    recorder.close()
    clock.undo()
    return path


async def test_play_pause_step_and_seek(run_db: Path) -> None:
    app = ReplayApp(Playback(Recording(run_db), "r", speed=8.0))
    async with app.run_test(size=(120, 36)) as pilot:
        await until(app, pilot, lambda: (app.store.step or 0) > 5)
        first, _, third, *_ = shown(app)
        assert first.startswith(" · PLAYBACK · demo · ")
        assert "VIEWER" not in first and "OPERATOR" not in first
        assert third.startswith(" PLAYBACK  ▶ 8×") and "●" in third
        assert "Knobs · revision" in "\n".join(shown(app)) and "k to change" not in "\n".join(shown(app))
        await pilot.press("space")
        await until(app, pilot, lambda: "‖ paused" in shown(app)[2])
        summary = app.store.summary  # records of ranks may be one step ahead
        assert summary
        await pilot.press("full_stop", "full_stop", "comma")
        await until(app, pilot, lambda: app.store.summary and app.store.summary.step == summary.step + 1)
        await pilot.press("end")
        await until(app, pilot, lambda: app.store.step == STEPS - 1 and "0:19 / 0:19" in shown(app)[2])
        await pilot.press("home", "right_curly_bracket", "right_curly_bracket")
        await until(app, pilot, lambda: app.store.step == 3)
        assert len(app.store.state.summaries) == 4, "the curves end at the playback position"
        await pilot.press("minus", "minus", "space")
        await until(app, pilot, lambda: "▶ 2×" in shown(app)[2])
        await pilot.press("k")
        assert not isinstance(app.screen, BoardScreen), "no knob key is offered"


async def test_a_position_is_the_step_that_was_asked_for(run_db: Path) -> None:
    """At step 10 of a replay, a rank's record of step 11 does not change the step that the position line shows."""
    recording = Recording(run_db)
    app = ReplayApp(Playback(recording, "r", begin=recording.at_step(10)))
    async with app.run_test(size=(120, 36)) as pilot:
        await until(app, pilot, lambda: app.store.summary is not None)
        with app.store.lock:
            record = next(iter(app.store.state.steps.values()))
            app.store.apply([structs.replace(record, step=11)])
        app.refresh_from_store()
        assert app.store.state.steps[record.rank].step == 11
        assert app.store.step == 10 and "step 10 · " in shown(app)[2]


async def test_steps_and_jumps_move_the_recording(run_db: Path) -> None:
    recording = Recording(run_db)
    app = ReplayApp(Playback(recording, "r", begin=recording.at_step(10)))

    def at() -> int | None:
        return app.store.summary.step if app.store.summary else None

    async with app.run_test(size=(120, 36)) as pilot:
        await until(app, pilot, lambda: at() == 10)
        await pilot.press("left_square_bracket", "left_square_bracket")
        await until(app, pilot, lambda: at() == 8)
        await pilot.press("right_square_bracket")
        await until(app, pilot, lambda: at() == 9)
        await pilot.press("colon", "2", "5", "enter")
        await until(app, pilot, lambda: at() == 25 and "paused" in shown(app)[2])
        await pilot.press("colon", "9", "9", "enter")
        await until(app, pilot, lambda: any("not 99" in one.message for one in app._notifications))
        assert at() == 25 and app.session.selection.step is None and "AT STEP" not in shown(app)[0]
        await pilot.press("colon", *"last", "enter")
        await until(app, pilot, lambda: at() == STEPS - 1)


async def test_it_pauses_at_the_end_and_starts_paused_at_a_position(run_db: Path) -> None:
    recording = Recording(run_db)
    app = ReplayApp(Playback(recording, "r", speed=64.0, begin=recording.at_step(30)))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(app, pilot, lambda: app.store.step == 30 and "paused" in shown(app)[2])
        await pilot.press("space")
        await until(app, pilot, lambda: app.store.step == STEPS - 1 and "paused" in shown(app)[2])
        # play slowly, because the replay would otherwise reach the end before the test reads the step
        await pilot.press(*["minus"] * 6, "space")
        await until(app, pilot, lambda: (app.store.step or 0) < STEPS - 1)


def test_a_replay_refuses_every_request(run_db: Path) -> None:
    recording = Recording(run_db)
    playback = Playback(recording, "run")
    for proposed in (Preview("q", {"micro_batches": 8}), Propose("p", {"micro_batches": 8})):
        with pytest.raises(ViewerError, match="this is a recording"):
            playback.ask(proposed)
    recording.close()
