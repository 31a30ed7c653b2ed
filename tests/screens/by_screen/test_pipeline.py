"""The pipeline screen: the slowest step and what happened in it, moving between the steps in the history, zoom, and
runs without a pipeline."""

import re
from collections.abc import Iterator

import pytest
from msgspec import structs

from agents.protocol import Action, Event, Timeline, Update
from cockpit.data.pipeline.step_comparison import compare
from cockpit.tui.widgets.pipeline.timeline import TimelinePanel
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import press, screen_text, settle
from tests.screens.fake_run import START_S, FakeRun
from tests.screens.sizes import SIZES

SPIKE, RANK = 84, 6


def spiky(**grid: int) -> FakeRun:
    return FakeRun(spike=(SPIKE, RANK), **grid)


def timeline(cockpit: Cockpit) -> TimelinePanel:
    return cockpit.app.screen.query_one("#timeline", TimelinePanel)


def words(cockpit: Cockpit) -> str:
    """The text of the screen with single spaces and without borders, so that wrapped sentences can be found."""
    return " ".join(screen_text(cockpit).replace("│", " ").split())


@pytest.mark.parametrize("size", SIZES)
async def test_the_slowest_step_is_answered_in_two_keys(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    cockpit = make_cockpit(spiky())
    async with cockpit.app.run_test(size=size) as pilot:
        cockpit.source.send(
            iter([Event(START_S + SPIKE / 2 - 0.1, "warning", "rank 6", "fans at [red]full")])
        )
        await press(cockpit, pilot, "3", "w")
        text = words(cockpit)
        assert "slowest kept: step 84" in text
        assert "step 84 took 723 ms, +75 % against the usual 414 ms: rank 6 (pp1 dp1 tp0" in text
        assert re.search(r"took 3[012]\d ms longer, without waiting: backward \+(29|30)\d ms", text)
        assert cockpit.app.session.selection.rank == RANK
        if size[0] > 80:
            assert "fans at [red]full" in text
            assert (
                "in its timeline B1 of stage 0 (pp0) took 343 ms," in text
                and "300 ms above its median" in text
            )


async def test_w_returns_and_kept_steps_are_walked(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(spiky())
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        selection = cockpit.app.session.selection
        await press(cockpit, pilot, "3", "comma")
        assert selection.step == 152 and "Pipeline · 1f1b · step 152" in screen_text(cockpit)
        await press(cockpit, pilot, "w")
        assert selection.step == SPIKE
        await press(cockpit, pilot, "w")
        assert selection.step == 152
        await press(cockpit, pilot, "full_stop", "full_stop")
        assert selection.step is None and "newest: step 156" in screen_text(cockpit)


async def test_kept_steps_of_a_frozen_screen_are_those_it_shows(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(spiky())
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        selection = cockpit.app.session.selection
        await press(cockpit, pilot, "3", "space")
        for step in range(160, 200):
            cockpit.source.send(cockpit.run.step(step))
        await press(cockpit, pilot, "comma")
        assert selection.step == 152 and "is not kept" not in screen_text(cockpit)
        await press(cockpit, pilot, "full_stop", "full_stop")
        assert selection.step is None


async def test_a_step_without_a_timeline_shows_its_phases(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(spiky())
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "3")
        cockpit.app.session.selection.step = 81
        await settle(cockpit, pilot)
        assert "no timeline of step 81 is kept (nearest: 80 and 84)" in words(cockpit)
        assert "r6 ▏forward 126" in screen_text(cockpit)
        cockpit.app.session.selection.step = 9000
        await settle(cockpit, pilot)
        assert screen_text(cockpit).count("step 9 000 is not kept") >= 2


async def test_zoom_stays_at_the_cursor_and_names_the_action(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(spiky())
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "3", "w", "K", *["right"] * 5)
        assert "▸ pp0 · B1 of stage 0 · 342.7 ms (149.3–492.0) · +703 %" in screen_text(cockpit)
        await press(cockpit, pilot, "right")
        assert "▸ pp0 · F3 of stage 0" in screen_text(cockpit)
        before = timeline(cockpit).cursor_ms
        await press(cockpit, pilot, *["plus"] * 6)
        panel = timeline(cockpit)
        assert panel.cursor_ms == before and panel.length_ms == pytest.approx(620 / 64)
        assert panel.start_ms <= before < panel.start_ms + panel.length_ms
        await press(cockpit, pilot, "0")
        assert panel.length_ms is None


class SeveralStages(FakeRun):
    """A run whose ranks hold two stages each, and whose replicas all send timelines; replica dp1 is the slowest."""

    def _timeline(self, rank: int, stage: int, step: int) -> Timeline:
        actions = [
            Action(
                "F", micro, 40.0 * micro + 10 * part, 40.0 * micro + 10 * part + 10, stage + self.pp * part
            )
            for micro in range(4)
            for part in range(2)
        ]
        return Timeline(rank, step, 160.0, actions)

    def step(self, step: int) -> Iterator[Update]:
        for update in super().step(step):
            yield update
            if isinstance(update, Timeline):
                yield structs.replace(update, rank=update.rank + 2, window_ms=180.0)


async def test_replicas_and_stages(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(SeveralStages())
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "3")
        assert "dp1 tp0 · the longest of 2 replicas" in screen_text(cockpit)
        await press(cockpit, pilot, "d")
        assert "dp0 tp0 · number 2 of 2 replicas" in screen_text(cockpit)
        assert " a, b stages of a rank" in screen_text(cockpit)
        await press(cockpit, pilot, "v")
        rows = [line for line in screen_text(cockpit).splitlines() if line.startswith("│ pp")]
        assert [row[2:8] for row in rows[:4]] == ["pp0 s0", "pp1 s1", "pp0 s2", "pp1 s3"]
        assert "╌" in rows[0] and "╌ its other stage" in screen_text(cockpit)


async def test_a_run_without_a_pipeline_shows_phases_by_rank(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(spiky(pp=1, dp=4))
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "3", "w")
        text = screen_text(cockpit)
        assert "Phases · slowest kept: step 84" in text and "Phases over all ranks" in text
        (row,) = (line for line in text.splitlines() if line.startswith("│ r6"))
        assert "backward 512" in row and "+126 %!" in row
        assert "pp0 s" not in text and "bubble" not in text.split("Phases · ")[1].split("Slowest")[0]


async def test_few_steps_and_a_small_terminal(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=1, change_at=None)
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "3", "w", "comma", "full_stop", "plus", "d", "v")
        assert "too few steps are known to compare it with" in screen_text(cockpit)
        await pilot.resize_terminal(20, 5)
        await press(cockpit, pilot, "right", "down")
        await pilot.resize_terminal(80, 24)
        await settle(cockpit, pilot)
        assert "newest: step 0" in screen_text(cockpit)
        with cockpit.store.lock:
            assert compare(cockpit.store, 0) is None


class NoTimelines(FakeRun):
    """A run that sends no timelines, such as one with the user's own training loop."""

    def step(self, step: int) -> Iterator[Update]:
        return (update for update in super().step(step) if not isinstance(update, Timeline))


async def test_the_overview_shows_phases_without_a_pipeline(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(NoTimelines(pp=1, dp=4))
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        text = screen_text(cockpit)
        assert "Phases of a step" in text and "▏backward 32 %" in text and "││ pp0" not in text
        await press(cockpit, pilot, "3")
        assert "Phases · newest: step 157" in screen_text(cockpit)


async def test_the_replica_of_the_selected_rank_is_shown_and_named(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(change_at=None)
    run = cockpit.run
    step = 156
    pair = [rank for rank in range(run.world) if run.coords(rank)["dp"] == 1 and run.coords(rank)["tp"] == 1]
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "3")
        assert timeline(cockpit).border_subtitle == "dp0 tp0: no other replica sends timelines"
        cockpit.app.session.selection.rank = pair[1]
        await settle(cockpit, pilot)
        said = str(timeline(cockpit).border_subtitle)
        assert said == f"dp0 tp0 · r{pair[1]} is in dp1 tp1, which sends no timeline"
        later = [
            structs.replace(run._timeline(rank, stage, step), window_ms=200.0)
            for stage, rank in enumerate(pair)
        ]
        cockpit.source.send(iter(later))
        cockpit.app.session.selection.rank = pair[0]
        await settle(cockpit, pilot)
        assert timeline(cockpit).border_subtitle == "dp1 tp1 · number 2 of 2 replicas"
        await press(cockpit, pilot, "d")
        assert str(timeline(cockpit).border_subtitle).startswith("dp0 tp0 · the longest of 2 replicas")
        await press(cockpit, pilot, "d")
        assert timeline(cockpit).border_subtitle == "dp1 tp1 · number 2 of 2 replicas"
