"""The Ranks screen: three keys show which rank is slow and why; other keys select steps, metrics, groups and
comparisons."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from msgspec import structs

from agents.protocol import Gone, Step, Update
from cockpit.tui.dialogs.metric_picker import MetricPicker
from cockpit.tui.widgets.ranks.details import RankDetails
from cockpit.tui.widgets.ranks.grid import RankGrid
from cockpit.tui.widgets.ranks.steps import RankSteps
from tests.screens.conftest import MakeCockpit
from tests.screens.driver import press, screen_text, settle, shown
from tests.screens.fake_run import FakeRun, big
from tests.screens.sizes import SIZES


@pytest.mark.parametrize("size", SIZES)
async def test_three_keys_show_which_rank_is_slow_and_why(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    """In a run of 1024 ranks, the keys are pressed right after the app starts."""
    cockpit = make_cockpit(big(), steps=20, change_at=None)
    async with cockpit.app.run_test(size=size) as pilot:
        await press(cockpit, pilot, "2", "w", "enter")
        shows = screen_text(cockpit)
        for part in (
            "Rank 517",
            "r517 pp4 dp0 tp5 ep5",
            "slow: own time",
            "127 peers of pp4",
            "backward +",
            "waits",
        ):
            assert part in shows
        await press(cockpit, pilot, "escape")
        assert isinstance(cockpit.app.focused, RankGrid)


async def test_w_goes_to_the_next_worst_rank(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "2")
        cockpit.source.send(iter([Gone(6, clean=False, text="killed", process="ended")]))
        seen = []
        for _ in range(2):
            await press(cockpit, pilot, "w")
            seen.append(cockpit.app.session.selection.rank)
        assert seen == [6, 3]
        await press(cockpit, pilot, "right", "left", "w")
        assert cockpit.app.session.selection.rank == 6, "after another key it begins with the worst again"


async def test_a_selected_step_shows_in_all_panels(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun(), steps=60, change_at=None)
    selection = cockpit.app.session.selection
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "2", "tab", "left", "left")
        assert isinstance(cockpit.app.focused, RankSteps) and selection.step == 57
        for panel in cockpit.app.screen.query(".panel"):
            assert "step 57" in str(panel.border_title)
        value = cockpit.store.rank_history.value("own", 57, 0)
        assert value is not None and f"{value:.0f}" in shown(cockpit.app)[4]
        await press(cockpit, pilot, "right", "right")
        assert selection.step is None and "step 57" not in screen_text(cockpit)
        selection.step = 4000
        await settle(cockpit, pilot)
        assert "step 4 000 is not kept" in screen_text(cockpit)


async def test_the_list_of_metrics_chooses_one(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "2", "p")
        assert isinstance(cockpit.app.screen, MetricPicker)
        assert "median" in screen_text(cockpit) and "▸ own time" in screen_text(cockpit)
        await press(cockpit, pilot, "down", "down", "enter")
        assert cockpit.app.session.selection.metric == "phase:forward"
        assert "Ranks · forward time" in screen_text(cockpit)
        await press(cockpit, pilot, "p", "up", "escape")
        assert cockpit.app.session.selection.metric == "phase:forward"


async def test_ranks_are_grouped_by_node_and_coloured_by_value(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun(node_ranks=4))
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "2", "g", "g", "g", "g")
        assert "by node" in screen_text(cockpit)
        labels = [line[2:7] for line in shown(cockpit.app)[3:8]]
        assert [label for label in labels if label.startswith("node")] == ["node0", "node1"]
        await press(cockpit, pilot, "c", "c")
        assert "by value" in screen_text(cockpit)


async def test_the_inspector_scrolls_and_turns_to_other_ranks(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 16)) as pilot:
        await press(cockpit, pilot, "2", "w", "enter")
        assert "more lines" in screen_text(cockpit) and "last step" not in screen_text(cockpit)
        await press(cockpit, pilot, *["down"] * 12)
        assert "last step 159" in screen_text(cockpit)
        await press(cockpit, pilot, "right")
        assert cockpit.app.session.selection.rank == 4
        assert isinstance(cockpit.app.focused, RankDetails) and "r4 pp1" in screen_text(cockpit)


async def test_long_names_of_phases_are_shown_whole_in_a_wide_panel(make_cockpit: MakeCockpit) -> None:
    @dataclass
    class Placing(FakeRun):
        def step(self, step: int) -> Iterator[Update]:
            for update in super().step(step):
                if isinstance(update, Step):  # all ranks spend no time in it, except rank 3
                    spent = {"gradient synchronise": 2.0 if update.rank == 3 else 0.01}
                    update = structs.replace(update, phases=update.phases | spent)
                yield update

    cockpit = make_cockpit(Placing(oversubscribed=False), steps=20, change_at=None)
    async with cockpit.app.run_test(size=(200, 60)) as pilot:
        await press(cockpit, pilot, "2")
        cockpit.app.session.selection.rank = 3
        await settle(cockpit, pilot)
        (line,) = (line for line in shown(cockpit.app) if "gradient synchronise " in line)
        assert "%" not in line  # the peers' 0.01 ms is shown as 0


@pytest.mark.parametrize(
    "size", [(20, 5), *(pytest.param(size, marks=pytest.mark.exhaustive) for size in ((30, 8), (80, 24)))]
)
async def test_small_terminals_and_ranks_without_records(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    for cockpit in (make_cockpit(big(), steps=2, change_at=None), make_cockpit(steps=0)):
        async with cockpit.app.run_test(size=size) as pilot:
            await press(
                cockpit, pilot, "2", "w", "tab", "left", "down", "o", "f", "tab", "down", "c", "g", "m"
            )
            assert len(shown(cockpit.app)) == size[1]
