"""Screens 5 to 8: traffic, curves, plan and log."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from textual.pilot import Pilot

from tests.screens.by_screen.test_log import day
from tests.screens.by_screen.test_plan import planned
from tests.screens.conftest import MakeCockpit
from tests.screens.driver import settle
from tests.screens.fake_run import FakeRun
from tests.screens.planned_run import PlannedRun
from tests.screens.sizes import PICTURES
from tests.screens.snapshots.pressing import Compare, quiet


@pytest.mark.parametrize("size", PICTURES)
def test_traffic(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """The traffic screen of a run on four nodes, in which one rank receives about three times as many bytes as each of
    the others."""
    cockpit = make_cockpit(FakeRun(node_ranks=2, hot_peer=6))
    assert snap_compare(cockpit.app, terminal_size=size, run_before=quiet(cockpit, "5"))


@pytest.mark.parametrize("size", PICTURES)
def test_curves(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """The cursor is on one step, and a chart shows its moving average on a log scale."""
    cockpit = make_cockpit()

    async def run_before(pilot: Pilot[None]) -> None:
        await settle(cockpit, pilot)
        await pilot.press("6")
        await quiet(cockpit, *["left"] * 40, "w", "w", "y")(pilot)

    assert snap_compare(cockpit.app, terminal_size=size, run_before=run_before)


@pytest.mark.parametrize("size", PICTURES)
def test_plan(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """The screen after one key press that raises the number of micro-batches in the what-if panel."""
    with TemporaryDirectory() as folder:
        cockpit = make_cockpit(PlannedRun(folder=Path(folder)))

        async def run_before(pilot: Pilot[None]) -> None:
            await planned(cockpit, pilot, "7", "right")

        assert snap_compare(cockpit.app, terminal_size=size, run_before=run_before)


@pytest.mark.parametrize("size", PICTURES)
def test_log(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """The log screen with log entries of each kind; the cursor is on a knob change, whose effect is shown."""
    cockpit = make_cockpit()

    async def run_before(pilot: Pilot[None]) -> None:
        await settle(cockpit, pilot)
        cockpit.source.send(day(cockpit.run))
        await quiet(cockpit, "8")(pilot)  # type: ignore[misc]
        await quiet(cockpit, *["up"] * 8)(pilot)  # type: ignore[misc]

    assert snap_compare(cockpit.app, terminal_size=size, run_before=run_before)
