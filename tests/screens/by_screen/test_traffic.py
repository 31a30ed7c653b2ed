"""The traffic screen: the all-to-all matrix with its cursor and zoom levels, the traffic by axis, and the model of
communication time fitted to the steps."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs
from textual.pilot import Pilot

from agents.protocol import Peers, Step, Summary, ToPeer, Update
from cockpit.tui.screens.run_screen import RunScreen
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import press, screen_text, settle, shown, until
from tests.screens.fake_run import FakeRun, big
from tests.screens.planned_run import PlannedRun
from tests.screens.sizes import SIZES

SKEWED = {"node_ranks": 2, "hot_peer": 6}


async def into(cockpit: Cockpit, pilot: Pilot[None]) -> int:
    """Press Enter as long as the footer offers to zoom in. Returns the number of key presses."""
    for count in range(9):
        if "⏎ zoom in" not in screen_text(cockpit):
            return count
        await press(cockpit, pilot, "enter")
    raise AssertionError("the footer still offers to zoom in")


@pytest.mark.parametrize("size", SIZES)
async def test_one_key_shows_the_bytes_between_ranks(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    cockpit = make_cockpit(FakeRun(**SKEWED))
    async with cockpit.app.run_test(size=size) as pilot:
        await press(cockpit, pilot, "5")
        text = screen_text(cockpit)
        assert "8/8 ranks sampled · 11 steps ago" in text and "step 148" in text
        pair = cockpit.store.traffic.matrices[148].hottest
        assert pair and pair.destination == 6
        assert f"! hottest r{pair.source} → r6 {pair.bytes / 1e3:.0f} kB" in text
        assert " · crosses nodes" in text and "receives r6 1.8" in text
        rows = [line for line in shown(cockpit.app) if "╲" in line and "524.3" in line]
        assert len(rows) == 8, text
        start = next(i for i, word in enumerate(rows[0].split()) if word == "r0")
        assert rows[0].split()[start + 1] == "╲", "a rank sends nothing to itself"


async def test_the_cursor_names_both_ends_and_chooses_the_rank_of_all_screens(
    make_cockpit: MakeCockpit,
) -> None:
    cockpit = make_cockpit(FakeRun(**SKEWED))
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "5", "x", "K", "left")
        pair = cockpit.store.traffic.matrices[148].hottest
        assert pair and cockpit.app.session.selection.rank == pair.source - 1
        source, destination = pair.source - 1, 5
        size = next(to.bytes for to in cockpit.run._peers(source, 148).sent if to.peer == destination)
        text = screen_text(cockpit)
        assert f"r{source} → r{destination}  {size / 1e3:.0f} kB" in text, text
        for word, rank in (("from", source), ("to  ", destination)):
            at = " ".join(f"{axis}{place}" for axis, place in cockpit.run.coords(rank).items())
            assert f"{word} {at} · node{rank // 2}" in text
        await press(cockpit, pilot, "2", "right", "5")
        chosen = cockpit.app.session.selection.rank
        assert (
            f"from {' '.join(f'{a}{v}' for a, v in cockpit.run.coords(chosen or 0).items())}"
            in screen_text(cockpit)
        )


async def test_enter_zooms_in_until_pairs_have_numbers_and_escape_zooms_out(
    make_cockpit: MakeCockpit,
) -> None:
    run = big()
    run.node_ranks = 8
    cockpit = make_cockpit(run, steps=10, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "5", "x")
        pair = cockpit.store.traffic.matrices[8].hottest
        assert pair and " · hottest of " in screen_text(cockpit)
        closer = await into(cockpit, pilot)
        assert closer in (2, 3)
        text = screen_text(cockpit)
        assert " · hottest of " not in text and f" {pair.bytes / 1e3:.1f}" in text, text
        assert f"r{pair.source} → r{pair.destination} " in text
        await press(cockpit, pilot, *["escape"] * closer)
        assert " · hottest of " in screen_text(cockpit)
        await press(cockpit, pilot, "v")
        closer = await into(cockpit, pilot)
        text = screen_text(cockpit)
        assert f" r{pair.source // 8 * 8} " in text and "rank to rank" in text, text
        await press(cockpit, pilot, *["escape"] * closer)
        assert "node to node" in screen_text(cockpit)
        await press(cockpit, pilot, "escape")
        screen = cockpit.app.screen
        assert isinstance(screen, RunScreen) and screen.NAME == "overview", (
            "the last Escape belongs to the screen"
        )


async def test_between_nodes_are_the_sums_of_their_ranks(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun(**SKEWED))
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "5", "v")
        rows = [cockpit.run._peers(rank, 148) for rank in (4, 5)]
        expected = sum(to.bytes for row in rows for to in row.sent if to.peer in (6, 7))
        text = screen_text(cockpit)
        assert "node to node" in text and f" {expected / 1e3:.1f}" in text, text
        assert "from node2 · r4 to r5, 2 ranks, 2 sampled" in text


async def test_a_missing_row_is_hatched_and_never_zero(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun())
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "5")
        store = cockpit.store
        with store.lock:
            store.apply(cockpit.run._peers(rank, 168) for rank in range(8) if rank != 3)
            store.apply(cockpit.run._peers(rank, 188) for rank in range(8) if rank != 3)
            store.apply(cockpit.run._summary(189, 400.0, []) for _ in range(1))
        await settle(cockpit, pilot)
        row = next(line for line in shown(cockpit.app) if " r3 " in line and "╱" in line)
        assert row.count("╱") >= 40 and "·" in row and "0.0" not in row.split("│")[1]
        assert "7/8 ranks sampled" in screen_text(cockpit)


@pytest.mark.parametrize("size", SIZES)
async def test_a_run_without_all_to_all_shows_its_axes(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    cockpit = make_cockpit(FakeRun(ep=1))
    async with cockpit.app.run_test(size=size) as pilot:
        await press(cockpit, pilot, "5")
        text = screen_text(cockpit)
        assert "no all-to-all in this run: ep = 1, so each rank has all experts" in text
        assert "38.0 ms" in text and "rank to rank" not in text


class Silent(FakeRun):
    """A run that reports no collectives, such as one with the user's own training loop."""

    def step(self, step: int) -> Iterator[Update]:
        for one in super().step(step):
            if isinstance(one, Summary):
                yield structs.replace(one, comm={}, a2a_bytes=0)
            elif not isinstance(one, Peers):
                yield structs.replace(one, comm={}) if isinstance(one, Step) else one


async def test_a_run_that_reports_no_traffic_says_what_to_do(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(Silent())
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "5", "tab")
        text = screen_text(cockpit)
        assert (
            "· this run reports no traffic" in text and "agents.join and cockpit wrap measure phases" in text
        )
        assert cockpit.app.focused.id == "axes" and "no traffic to fit" not in text  # type: ignore[union-attr]


async def test_a_step_that_is_not_kept_is_reported(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun())
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "5")
        cockpit.app.session.selection.step = 60
        await settle(cockpit, pilot)
        assert "step 48 (sample before step 60)" in screen_text(cockpit)
        cockpit.app.session.selection.step = 3
        await settle(cockpit, pilot)
        assert "step 3 is not kept, and no sample before it; kept samples: 8," in screen_text(cockpit)


async def test_the_fit_is_shown_beside_the_link_and_the_planner(
    make_cockpit: MakeCockpit, tmp_path: Path
) -> None:
    """If ranks share cores, the panel shows no predicted exposed time, and says that the run's times are not those of
    a cluster."""
    cockpit = make_cockpit(PlannedRun(folder=tmp_path))
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "5", "tab", "tab", "z")
        await until(cockpit.app, pilot, lambda: "collectives a step" in screen_text(cockpit))
        text = screen_text(cockpit)
        assert "nvlink3" in text and "(A100-80)" in text and "not those of a cluster" not in text
        assert re.search(r"planned +\d+\.\d ms, measured 63\.0", text), text
        assert "bytes do not vary: no β" in text and "a micro-batch · rest " in text
    cockpit = make_cockpit(PlannedRun(folder=tmp_path, gpu=False, oversubscribed=True))
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "5", "tab", "tab", "z")
        await until(cockpit.app, pilot, lambda: "collectives a step" in screen_text(cockpit))
        text = screen_text(cockpit)
        assert "8 ranks share 2 cores: times are not those of a cluster" in text and "planned" not in text


@pytest.mark.parametrize(
    "size",
    [(20, 5), *(pytest.param(size, marks=pytest.mark.exhaustive) for size in ((30, 9), (60, 16), (250, 70)))],
)
async def test_any_size_and_hostile_hosts(make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    cockpit = make_cockpit(FakeRun(node_ranks=3))
    async with cockpit.app.run_test(size=size) as pilot:
        await press(cockpit, pilot, "5")
        with cockpit.store.lock:
            cockpit.store.apply(
                type(hello)(
                    **{f: getattr(hello, f) for f in hello.__struct_fields__} | {"host": "[red]\x1b[31mx"}
                )
                for hello in list(cockpit.store.state.hellos.values())
            )
            cockpit.store.apply([Peers(0, 188, [ToPeer(7, 2**53)])])
        await press(cockpit, pilot, "v", "enter", "x", "right", "down", "z", "escape", "v", "tab", "tab")
        assert "\x1b" not in screen_text(cockpit)


def test_the_screens_need_no_numpy() -> None:
    """An installation without the engine has no numpy, and the planner modules that need it are slow to import."""
    code = "import sys; sys.modules['numpy'] = None; import cockpit.tui.app"
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_the_matrix_follows_the_filter(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun(**SKEWED))
    async with cockpit.app.run_test(size=(200, 60)) as pilot:
        await press(cockpit, pilot, "5")
        whole = screen_text(cockpit)
        assert "╌" not in whole and "filter" not in str(cockpit.app.screen.query_one("#matrix").border_title)
        await press(cockpit, pilot, "slash", *"rank", "greater_than_sign", "equals_sign", "4", "enter")
        assert "filter 4/8, rest dim" in str(cockpit.app.screen.query_one("#matrix").border_title)
        text = screen_text(cockpit)
        rows = [line for line in shown(cockpit.app) if "╲" in line and "524.3" in line]
        assert all("╌" in row for row in rows[:4]) and not any("╌" in row for row in rows[4:]), text
        listed = text.partition("hottest pairs among the ranks of the filter")[2].partition("kept")[0]
        ends = re.findall(r"r(\d) → r(\d)", listed)
        assert ends and all(min(int(one), int(other)) >= 4 for one, other in ends), text
        await press(cockpit, pilot, "v")
        assert "╌" in screen_text(cockpit), "nodes without a rank of the filter are dimmed"
