"""Screens 1 to 4: overview, ranks, pipeline and experts."""

import pytest

from tests.screens.conftest import MakeCockpit
from tests.screens.fake_run import FakeRun, big
from tests.screens.sizes import PICTURES
from tests.screens.snapshots.pressing import Compare, quiet


@pytest.mark.parametrize("size", PICTURES)
def test_overview(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    cockpit = make_cockpit()
    assert snap_compare(cockpit.app, terminal_size=size, run_before=quiet(cockpit))


@pytest.mark.parametrize("size", PICTURES)
def test_ranks(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """The worst of 1024 ranks is selected, and the inspector shows how it differs."""
    cockpit = make_cockpit(big(), steps=20, change_at=None)
    assert snap_compare(cockpit.app, terminal_size=size, run_before=quiet(cockpit, "2", "w"))


@pytest.mark.parametrize("size", PICTURES)
def test_pipeline(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """The pipeline screen, which shows the timeline of the slowest step next to that of the newest step."""
    cockpit = make_cockpit(FakeRun(spike=(84, 6)))
    assert snap_compare(cockpit.app, terminal_size=size, run_before=quiet(cockpit, "3", "w"))


@pytest.mark.parametrize("size", PICTURES)
def test_experts(snap_compare: Compare, make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    """The experts screen, with the cursor on a dead expert (one that gets almost no tokens)."""
    cockpit = make_cockpit(FakeRun(dead={(2, 5): 48}, hot={(0, 3): 120}))
    assert snap_compare(cockpit.app, terminal_size=size, run_before=quiet(cockpit, "4", "w"))
