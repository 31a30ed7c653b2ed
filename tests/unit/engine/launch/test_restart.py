"""The time and the steps that a restart of the ranks costs, whatever the machine's clock does."""

import time

import pytest

from engine.launch.restarts.restart import Handover, Restart
from tests.unit.agents.fleet import make_step


def test_times_of_a_restart_are_those_of_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 begins at 1000 s and is restarted twice; rank 3 reads what rank 0 has recorded."""
    handover, now = Handover(), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: -1.0)
    assert Restart(handover, 0).begin(leads=True) == Restart(handover, 0).begin(leads=False) == 0.0
    handover.step_done(1020.0)
    handover.leave("grid.tp=2")
    now = 1100.0
    first = Restart(handover, 1)
    assert (first.begin(leads=True), first.begin(leads=False), handover.text) == (100.0, 100.0, "grid.tp=2")
    assert first.at_first_step(make_step(0, 7), 2, 1103.5).lost_s == 83.5
    handover.step_done(1104.0)
    now = 2680.0
    assert Restart(handover, 2).begin(leads=False) == 1680.0 and handover.text is None


def test_a_rank_that_died_before_it_began_leaves_no_time() -> None:
    assert Restart(Handover(), 1).begin(leads=False) == 0.0
