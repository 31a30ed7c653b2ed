"""Snapshots of whole screens, so that every visible change is reviewed.

After an intended change: `python -m pytest tests/screens/snapshots/test_snapshots.py --snapshot-update`, and look at
the SVGs.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from textual.pilot import Pilot

from cockpit.knobs.preview import STABLE_S
from tests.screens.by_screen.test_log import day
from tests.screens.by_screen.test_plan import planned
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.dialogs.test_steering import FASTER, SAME, UNKNOWN
from tests.screens.driver import settle
from tests.screens.fake_run import FakeRun, big
from tests.screens.planned_run import PlannedRun
from tests.screens.sizes import PICTURES

Compare = Callable[..., bool]


def quiet(cockpit: Cockpit, *keys: str) -> Callable[[Pilot[None]], Awaitable[None]]:
    async def run_before(pilot: Pilot[None]) -> None:
        await settle(cockpit, pilot)
        await pilot.press(*keys)
        await settle(cockpit, pilot)
        await settle(cockpit, pilot)

    return run_before


@pytest.mark.parametrize("size", PICTURES)
def test_ranks(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """The worst of 1024 ranks, and what differs about it."""
    cockpit = make_cockpit(big(), steps=20, change_at=None)
    assert snap_compare(cockpit.app, terminal_size=size, run_before=quiet(cockpit, "2", "w"))


@pytest.mark.parametrize("size", PICTURES)
def test_overview(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    cockpit = make_cockpit()
    assert snap_compare(cockpit.app, terminal_size=size, run_before=quiet(cockpit))


@pytest.mark.parametrize("size", PICTURES)
def test_experts(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """The cursor on a dead expert."""
    cockpit = make_cockpit(FakeRun(dead={(2, 5): 48}, hot={(0, 3): 120}))
    assert snap_compare(cockpit.app, terminal_size=size, run_before=quiet(cockpit, "4", "w"))


@pytest.mark.parametrize("size", PICTURES)
def test_curves(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """The cursor on a step, and the average of a chart on a log scale."""
    cockpit = make_cockpit()

    async def run_before(pilot: Pilot[None]) -> None:
        await settle(cockpit, pilot)
        await pilot.press("6")
        await quiet(cockpit, *["left"] * 40, "w", "w", "y")(pilot)

    assert snap_compare(cockpit.app, terminal_size=size, run_before=run_before)


@pytest.mark.parametrize("size", PICTURES)
def test_traffic(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """Four nodes, and a rank that receives thrice the bytes of the others."""
    cockpit = make_cockpit(FakeRun(node_ranks=2, hot_peer=6))
    assert snap_compare(cockpit.app, terminal_size=size, run_before=quiet(cockpit, "5"))


@pytest.mark.parametrize("size", PICTURES)
def test_pipeline(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """The slowest step beside the newest one."""
    cockpit = make_cockpit(FakeRun(spike=(84, 6)))
    assert snap_compare(cockpit.app, terminal_size=size, run_before=quiet(cockpit, "3", "w"))


@pytest.mark.parametrize("size", PICTURES)
def test_log(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """Entries of each kind, with the cursor on a change and its effect."""
    cockpit = make_cockpit()

    async def run_before(pilot: Pilot[None]) -> None:
        await settle(cockpit, pilot)
        cockpit.source.send(day(cockpit.run))
        await quiet(cockpit, "8")(pilot)  # type: ignore[misc]
        await quiet(cockpit, *["up"] * 7)(pilot)  # type: ignore[misc]

    assert snap_compare(cockpit.app, terminal_size=size, run_before=run_before)


@pytest.mark.parametrize("size", PICTURES)
def test_board(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """A running trial of another operator, and an edit with its preview."""
    cockpit = make_cockpit()

    async def run_before(pilot: Pilot[None]) -> None:
        await settle(cockpit, pilot)
        cockpit.source.send(iter([cockpit.run.trial("t", "after", 16, measured=12, before_ms=655.0)]))
        await settle(cockpit, pilot)  # draw the trial on the overview before the board covers it
        await pilot.press("k", "right")
        await settle(cockpit, pilot)
        cockpit.clock.now += STABLE_S
        await settle(cockpit, pilot)
        cockpit.source.answer(FASTER, SAME, UNKNOWN)
        await settle(cockpit, pilot)
        await settle(cockpit, pilot)

    assert snap_compare(cockpit.app, terminal_size=size, run_before=run_before)


@pytest.mark.parametrize("size", PICTURES)
def test_plan(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """More micro-batches as a what-if."""
    with TemporaryDirectory() as folder:
        cockpit = make_cockpit(PlannedRun(folder=Path(folder)))

        async def run_before(pilot: Pilot[None]) -> None:
            await planned(cockpit, pilot, "7", "right")

        assert snap_compare(cockpit.app, terminal_size=size, run_before=run_before)


def test_1024_ranks_without_colour(
    snap_compare: Compare, make_cockpit: MakeCockpit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    cockpit = make_cockpit(big(), steps=10, change_at=None)
    assert snap_compare(cockpit.app, terminal_size=(120, 36), run_before=quiet(cockpit))


@pytest.mark.parametrize("size", PICTURES)
def test_prompt(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """A filter is applied and a step selected, while another filter is typed."""
    cockpit = make_cockpit(steps=20, change_at=None)
    keys = (
        "slash",
        *"tp",
        "equals_sign",
        "1",
        "enter",
        "left_square_bracket",
        "slash",
        "space",
        "ampersand",
        *"ow",
    )
    assert snap_compare(cockpit.app, terminal_size=size, run_before=quiet(cockpit, *keys))
