"""The charts of a long run show every spike, live and after a hub restart, and every step of a recording."""

import math
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import structs

from agents.hub.recorder import Limits, Recorder
from agents.hub.telemetry.history import History
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Summary, Update
from agents.recording.detail import curve_between
from agents.recording.format import RecordingError
from agents.recording.reader import Recording
from agents.recording.replay import Replay
from agents.rundir.runs import RunError
from agents.state.metric_curves import Curve
from agents.state.run_state import HISTORY, RunState
from cockpit.data.curves.job_metrics import number
from cockpit.data.curves.segments import Reading, Segment, half_life, polylines, reading, segments, smoothed
from cockpit.data.curves.view import clamp, extent, pan, zoom
from cockpit.data.log.run_log import Mark
from cockpit.data.scale import Scale
from cockpit.data.sources.detail import DetailReader
from cockpit.data.sources.playback import Playback
from cockpit.data.store import Store
from cockpit.tui.drawing.chart import XAxis
from cockpit.tui.drawing.chart_lines import AXIS
from cockpit.tui.drawing.theme import palette
from cockpit.tui.widgets.curves.loss_and_throughput import plot
from tests.unit.agents.fleet import DEADLINE_S, make_hello, make_summary

STEPS = 20_000
SPIKE = 3456


def at(step: int) -> Summary:
    return structs.replace(make_summary(step), loss=2 - step / STEPS + 3 * (step == SPIKE))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of a run of many steps."""
    path = tmp_path_factory.mktemp("run") / "run.db"
    sequence = UpdateLog()
    recorder = Recorder(path, sequence, Limits(commit_s=0.01, segment_bytes=1 << 20))
    sequence.publish(make_hello(0, 1))
    for step in range(STEPS):
        sequence.publish(at(step))
        if step % 50 == 0:
            recorder.follow()
    recorder.close(60)
    return path


def spike_is_drawn(found: list[Segment]) -> bool:
    """Whether the drawn line rises far above the rest of the curve at the spike, and only there."""
    points = [point for one in found for point in one.points]
    assert (SPIKE, at(SPIKE).loss) in points
    width, height = 109, 21
    marks: list[Mark] = []
    rows = [
        line.strip(width, palette("cockpit-dark").text).text
        for line in plot(found, marks, width, height, palette("cockpit-dark"))
    ]
    high = [x for row in rows[: height // 2] for x, glyph in enumerate(row) if ord(glyph) > 0x2800]
    first, last = points[0][0], points[-1][0]
    spike = XAxis(first, last, width - AXIS).column(SPIKE)
    return {x - AXIS for x in high} == {spike}


def test_a_spike_of_one_step_is_drawn_live_and_in_a_replay(recorded: Path) -> None:
    replay = Replay(Recording(recorded))
    replay.seek(replay.recording.at_end())
    assert extent(replay.state) == (0, STEPS - 1)
    assert spike_is_drawn(segments(replay.state, "loss"))
    watcher = RunState()  # the snapshot that the hub sends to a late client
    for update in replay.state.replay():
        watcher.apply(update)
    assert spike_is_drawn(segments(watcher, "loss"))


def test_a_spike_of_one_step_is_drawn_after_a_hub_restart(recorded: Path) -> None:
    sequence = UpdateLog()
    recall = History(recorded, sequence)
    for update in (make_hello(0, 1, step=STEPS), at(STEPS)):
        sequence.publish(update)
    deadline = time.monotonic() + DEADLINE_S
    while not recall.tick(0):  # until the recording is readable
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)
    assert extent(sequence.state) == (0, STEPS)
    assert spike_is_drawn(segments(sequence.state, "loss"))


def test_a_recording_gives_every_step_in_view(recorded: Path) -> None:
    recording = Recording(recorded)
    end = recording.span()
    detail = curve_between(recording, 3000, 3900, end.last_epoch, end.last_seq)
    assert detail.points("loss") == [(step, at(step).loss) for step in range(3000, 3901)]
    # the hello is update 1, so step 3100 is update 3102
    early = curve_between(recording, 3000, 3900, end.last_epoch, 3102)
    assert [step for step, _ in early.points("loss")] == list(range(3000, 3101))


def test_repeated_steps_replace_the_earlier_ones(tmp_path: Path) -> None:
    sequence = UpdateLog()
    recorder = Recorder(tmp_path / "run.db", sequence, Limits(commit_s=0.001))
    told: list[Update] = [make_hello(0, 1), *map(at, range(300))]
    told += [structs.replace(at(step), loss=7.0) for step in range(200, 250)]
    for update in told:
        sequence.publish(update)
        recorder.follow()
        threading.Event().wait(0.0005)
    recorder.close(60)
    recording = Recording(tmp_path / "run.db")
    points = curve_between(recording, 190, 280, sequence.epoch, sequence.seq).points("loss")
    assert points == [(step, at(step).loss if step < 200 else 7.0) for step in range(190, 250)]


@pytest.fixture
def played(recorded: Path) -> Iterator[Store]:
    recording = Recording(recorded)
    playback = Playback(recording, "r", begin=recording.at_end())
    store = Store(playback.clock)
    playback.start(store)
    yield store
    playback.stop()


def until(store: Store, true: object) -> None:
    pause = threading.Event()
    for _ in range(2000):
        with store.lock:
            if true():  # type: ignore[operator]
                return
        pause.wait(0.01)
    raise AssertionError("the condition did not become true in time")


def test_a_replay_shows_every_step_of_a_view(played: Store) -> None:
    until(played, lambda: played.step == STEPS - 1)
    coarse = segments(played.state, "loss", (3000, 3900))
    assert [one.width for one in coarse] == [32] and len(coarse[0].points) < 200
    with played.lock:
        played.curve_view.show((3000, 3900))
    until(played, lambda: played.curve_view.detail is not None)
    fine = segments(played.state, "loss", played.curve_view.steps, played.curve_view.detail)
    assert [(one.width, len(one.points)) for one in fine] == [(1, 901)]
    with played.lock:
        played.curve_view.show((18_000, STEPS - 1))
    until(played, lambda: played.curve_view.detail is not None)
    fine = segments(played.state, "loss", played.curve_view.steps, played.curve_view.detail)
    steps = [step for one in fine for step, _ in one.points]
    assert (
        steps[-HISTORY:] == list(range(STEPS - HISTORY, STEPS))
        and max(b - a for a, b in pairwise(steps)) == 1
    )


def late_client(recorded: Path) -> Store:
    """The store of a client that connected at the end of the run, so it has the old steps only in buckets."""
    replay = Replay(Recording(recorded))
    replay.seek(replay.recording.at_end())
    replay.forward(lambda moment: False)
    store = Store()
    store.rebuild(replay.state.replay())
    return store


def test_a_live_screen_reads_every_step_of_a_view_from_the_recording(recorded: Path) -> None:
    store = late_client(recorded)
    view = store.curve_view
    reader = DetailReader(str(recorded.parent))
    reader.start(store)
    try:
        with store.lock:
            view.show((STEPS - 3000, STEPS - 1))
            assert [one.width for one in segments(store.state, "loss", view.steps)] == [32, 1]
        until(store, lambda: view.detail is not None)
        with store.lock:
            for step in range(STEPS, STEPS + HISTORY + 100):
                store.apply([at(step)])
            assert view.steps == (STEPS - 3000 + HISTORY + 100, STEPS + HISTORY + 99), "it follows the run"
            found = segments(store.state, "loss", view.steps, view.detail)
            assert [one.width for one in found] == [8, 1], "the detail grows with the run"
            view.show((3000, 3900))
        until(store, lambda: view.detail is not None)
        assert [
            (one.width, len(one.points)) for one in segments(store.state, "loss", view.steps, view.detail)
        ] == [(1, 901)]
    finally:
        reader.stop()


@pytest.mark.parametrize("target", ["ipc:///nowhere", "no-such-run", "."])
def test_without_a_readable_recording_the_buckets_remain(recorded: Path, target: str) -> None:
    store = late_client(recorded)
    view = store.curve_view
    view.show((3000, 3900))
    with pytest.raises((RunError, RecordingError)):
        DetailReader(target)._read(store, (3000, 3900))
    assert [one.width for one in segments(store.state, "loss", view.steps, view.detail)] == [32]
    assert view.wanted_detail() == (3000, 3900)
    view.show((0, STEPS - 1))
    assert view.wanted_detail() is None, "there are more buckets than columns"
    view.show((STEPS - HISTORY, STEPS - 1))
    assert view.wanted_detail() is None, "every step is known"


def test_a_view_at_the_newest_step_follows_the_run() -> None:
    store = Store()
    view = store.curve_view
    store.apply(map(at, range(1000)))
    view.zoom(0.5)
    assert view.steps == (499, 999) and view.follows
    store.apply([at(1000)])
    assert view.steps == (500, 1000)
    store.state.apply(at(1010))  # a client changes the state before it records the updates
    view.zoom(0.5)
    assert view.steps == (760, 1010) and view.follows
    view.pan(-1)
    store.apply([at(1011)])
    assert view.steps == (510, 760), "a view of earlier steps stays"
    view.zoom(0.5, at=510)
    assert view.steps == (510, 635)


def test_a_repeated_step_is_removed_from_the_detail() -> None:
    store = Store()
    view = store.curve_view
    store.apply(map(at, range(2000)))
    detail = Curve()
    detail.extend(map(at, range(100, 900)))
    view.show((100, 900))
    view.set_detail((100, 900), detail)
    view.set_detail((0, 50), Curve())
    store.apply([at(500)])
    assert view.detail is detail and detail.points("loss")[-1] == (500, at(500).loss) and detail.width == 1
    assert [step for one in segments(store.state, "loss", view.steps, detail) for step, _ in one.points] == [
        *range(100, 501)
    ]


def test_lines_join_consecutive_points() -> None:
    old = Segment([(0, 1.0), (5, 9.0), (31, 1.0), (32, 1.0), (60, 0.0), (63, 1.0), (128, 1.0)], width=32)
    new = Segment([(129, 1.0), (130, math.nan), (131, 1.0), (132, 1.0), (150, 1.0)])
    joined = [[step for step, _ in run] for run in polylines([old, new], 10.0)]
    assert joined == [[0, 5, 31, 32, 60, 63], [128, 129], [131, 132], [150]]
    assert [len(run) for run in polylines([old, new], 0.001)] == [8, 3], (
        "the gap is narrower than a column, so it is not drawn"
    )


def test_a_view_stays_within_the_run() -> None:
    whole = (0, 1000)
    view = clamp(zoom(whole, 0.5), whole)
    assert view == (250, 750)
    assert clamp(pan(view, -0.25), whole) == (125, 625)
    assert clamp(pan(view, 3), whole) == (500, 1000)
    assert clamp(zoom(view, 2), whole) is None
    assert zoom((100, 101), 0.5) == (92, 109), "a view has at least MIN_STEPS"


def test_an_average_does_not_depend_on_which_steps_are_known() -> None:
    every = [(step, 1.0 if step < 100 else 3.0) for step in range(200)]
    tenth = every[::10]
    (fine,), (coarse,) = smoothed([every], 20), smoothed([tenth], 20)
    assert fine[0] == (0, 1.0) and fine[99] == (99, pytest.approx(1.0))
    assert fine[119][1] == pytest.approx(2.0, abs=0.02), "after the half-life, half of the jump"
    assert dict(coarse)[190] == pytest.approx(dict(fine)[190], abs=0.06)
    broken = smoothed([every[:100], every[150:]], 20)
    assert broken[1][0][1] > 2.5, "a gap of many steps ages the values before it"


@pytest.mark.parametrize(
    ("steps", "share", "round"), [(160, 0.02, 5), (1000, 0.05, 50), (3, 0.01, 2), (10**6, 0.02, 20_000)]
)
def test_a_half_life_is_a_round_number(steps: int, share: float, round: int) -> None:
    assert half_life(steps, share) == round


def test_a_reading_tells_a_value_from_a_bucket_and_from_nothing() -> None:
    found = [Segment([(32, 2.0), (40, 9.0), (63, 1.0)], width=32), Segment([(64, 4.0), (66, math.nan)])]
    assert reading(found, 40) == Reading(9.0, 9.0), "a kept value is exact"
    assert reading(found, 50) == Reading(1.0, 9.0, 32)
    assert reading(found, 64) == Reading(4.0, 4.0)
    assert reading(found, 65) is None and reading(found, 5) is None
    bucket = Segment([(128, 2.0), (130, math.nan), (159, 3.0)], width=32)
    for at, where in ((66, found), (140, [bucket])):
        broken = reading(where, at)
        assert broken and math.isnan(broken.low), "the range of the other values would hide it"


def test_zooming_keeps_the_place_of_the_cursor() -> None:
    assert zoom((0, 1000), 0.5, 200) == (100, 600)
    assert zoom((0, 1000), 0.5, 1000) == (500, 1000)
    assert zoom((0, 1000), 0.5, 5000) == (250, 750), "a cursor outside the view does not count"


def test_numbers_below_ten_thousand_are_written_in_full() -> None:
    """Step times of 1 150 and 1 249 ms must differ on the screen."""
    assert [number(value) for value in (999.0, 1163.4, 1249.0, 19_900.0)] == [
        "999.0",
        "1 163",
        "1 249",
        "19.9 k",
    ]
    assert Scale(1050, 1200).labels([1.0, 0.5, 0.0]) == ["1 200", "1 125", "1 050"]
