"""The experts screen: which expert is dead, in which layer, since when, and which rank holds it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from agents.hub.recorder import Limits, Recorder
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Experts, ExpertShare, Hello, Loads, LoadSummary, Update
from agents.recording.reader import Recording
from cockpit.data.sources.playback import Playback
from cockpit.tui.replay import ReplayApp
from tests.screens.conftest import MakeCockpit
from tests.screens.driver import press, screen_text, settle, shown, until
from tests.screens.fake_run import FakeRun
from tests.screens.sizes import SIZES

DEAD = FakeRun(dead={(2, 5): 48})


@pytest.mark.parametrize("size", SIZES)
async def test_two_keys_answer_which_expert_is_dead_since_when_and_who_holds_it(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    cockpit = make_cockpit(FakeRun(dead={(2, 5): 48}))
    async with cockpit.app.run_test(size=size) as pilot:
        await press(cockpit, pilot, "4", "w")
        text = screen_text(cockpit)
        assert "L2 e5  ╳ dead since step 48, not yet at step 47" in text
        assert "held by r6 (pp1 dp1 tp0 ep2) on node0" in text
        assert (cockpit.app.session.selection.layer, cockpit.app.session.selection.expert) == (2, 5)


async def test_without_a_cursor_the_details_are_those_of_the_worst_expert(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun(dead={(2, 5): 48}))
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "4")
        text = screen_text(cockpit)
        assert "Expert · L2 e5, the worst" in text and "╳ dead since step 48" in text
        assert cockpit.app.session.selection.expert is None


async def test_without_a_dead_or_hot_expert_the_details_keep_their_subject(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=20, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "4")
        (first,) = (line for line in shown(cockpit.app) if "─ Expert ·" in line)
        for step in range(20, 26):
            cockpit.source.send(cockpit.run.step(step))
            await settle(cockpit, pilot)
            assert first in shown(cockpit.app)


async def test_a_cell_of_many_experts_shows_the_worst_on_both_sides(make_cockpit: MakeCockpit) -> None:
    run = FakeRun(layers=58, experts=256, dead={(12, 17): 40}, hot={(30, 7): 20}, oversubscribed=False)
    cockpit = make_cockpit(run, steps=60)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "4", "w", "w")
        lines = shown(cockpit.app)
        assert any("a cell is 4 layers × 4 experts" in line for line in lines)
        dead, hot = (next(line for line in lines if layers in line) for layers in ("L12-15", "▸L28-31"))
        assert dead.index("╳") - dead.index("L12-15") == 7 + 17 // 4 and "0.00×" in dead
        assert "▲" in hot and "2.9" in hot
        assert "L30 e7  ▲ hot since step 20" in screen_text(cockpit)


async def test_enter_shows_one_layer_and_the_capacity_and_escape_the_map(make_cockpit: MakeCockpit) -> None:
    run = FakeRun(dead={(2, 5): 48})
    run.knobs["capacity_factor"] = 1.25
    cockpit = make_cockpit(run, change_at=None)
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "4", "w", "enter")
        text = screen_text(cockpit)
        assert "load of layer 2" in text and "cap 1.25×" in text and "capacity 1.25×" in text
        await press(cockpit, pilot, "right", "up")
        assert "load of layer 1" in screen_text(cockpit)
        assert (cockpit.app.session.selection.layer, cockpit.app.session.selection.expert) == (1, 6)
        await press(cockpit, pilot, "escape")
        assert "▸L1" in screen_text(cockpit)
        await pilot.resize_terminal(20, 5)
        await press(cockpit, pilot, "enter", "m", "m", "o", "M", "tab", "down")
        await pilot.resize_terminal(80, 24)
        await settle(cockpit, pilot)
        assert "Expert" in screen_text(cockpit)


async def test_figures_over_steps_and_a_selected_step(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun(dead={(2, 5): 48}), steps=60, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "4", "m", *["left"] * 12)
        step = cockpit.app.session.selection.step
        assert step == 47
        await press(cockpit, pilot, "M")
        assert "step 47" in screen_text(cockpit) and "no dead and no hot expert" in screen_text(cockpit)


class Without(FakeRun):
    """A run that sends a summary of the expert load for each layer, but no per-expert loads."""

    def step(self, step: int) -> Iterator[Update]:
        top = [ExpertShare(3, 0.5), ExpertShare(1, 0.2)]
        yield Loads(step, [LoadSummary(2, 100, 4.0, 1.5, 0.6, top, 3, 10)])
        yield from (one for one in super().step(step) if not isinstance(one, Experts))


class NoExperts(Without):
    def begin(self) -> Iterator[Update]:
        for one in super().begin():
            yield structs.replace(one, facts={**one.facts, "experts": 0}) if isinstance(one, Hello) else one

    def step(self, step: int) -> Iterator[Update]:
        yield from (one for one in super().step(step) if not isinstance(one, Loads))


async def test_with_summaries_alone_the_screen_says_what_is_known(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(Without())
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "4", "w", "m", "enter", "o", "right")
        text = screen_text(cockpit)
        assert "no sample of all loads yet" in text and "expert 3 50.0 %" in text and "4.00×" in text


async def test_a_model_without_experts_says_what_to_do(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(NoExperts())
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "4", "w", "m", "enter", "o", "right")
        text = screen_text(cockpit)
        assert "· no experts in this model" in text and "[model.moe] experts = 8" in text
        assert "no load of a single expert yet" not in text  # the panel below would be empty
        await press(cockpit, pilot, "tab")
        assert cockpit.app.focused.id == "experts"  # type: ignore[union-attr]
        await pilot.resize_terminal(20, 5)
        await settle(cockpit, pilot)


@pytest.mark.parametrize("at", [30, 50])
async def test_a_replay_that_begins_late_knows_since_when(tmp_path: Path, at: int) -> None:
    updates, run = UpdateLog(), FakeRun(dead={(2, 5): 18})
    limits = Limits(segment_bytes=40_000, commit_s=0.01, snapshot_multiple=0)
    recorder = Recorder(tmp_path / "run.db", updates, limits)
    for update in run.story(60):
        updates.publish(update)
        recorder.follow()
    recorder.close()
    recording = Recording(tmp_path / "run.db")
    app = ReplayApp(Playback(recording, "r", begin=recording.at_step(at)))
    async with app.run_test(size=(120, 36)) as pilot:
        await until(app, pilot, lambda: len(app.store.expert_history.loads) > 5)
        await pilot.press("4", "w")
        await until(app, pilot, lambda: "since step 18, not yet at step 17" in "\n".join(shown(app)))
        await pilot.press("home")
        await until(app, pilot, lambda: not app.store.step)
        await until(app, pilot, lambda: app.store.expert_history.streak(2, 5) is None)


async def test_without_colours_the_bar_of_the_selected_expert_is_not_inverted(
    make_cockpit: MakeCockpit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    cockpit = make_cockpit(FakeRun(), steps=20, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        await press(cockpit, pilot, "4", "w", "enter")
        segments = [one for strip in cockpit.app.screen._compositor.render_strips() for one in strip]
        inverted = [one.text for one in segments if one.style and one.style.reverse]
        assert any(text.startswith("e") for text in inverted), "the index of the expert is marked"
        assert not any(set(text) & set("▁▂▃▄▅▆▇█") for text in inverted)
