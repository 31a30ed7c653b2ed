"""Tests that a rank's idle time in the pipeline is split correctly by cause: the schedule, waiting for other stages,
and overhead."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.planner.idle_time import split_idle
from engine.planner.schedule import ScheduleClock

CLOCK = ScheduleClock("1f1b", 2, 1, 4)
EVEN = [[1.0 if act.kind == "F" else 2.0 for act in acts] for acts in CLOCK.acts]
WINDOW = 15.0  # each of 4 micro-batches takes 3 s on a stage, and the pipeline waits 3 s for the other stage


def test_a_run_without_delays_idles_by_its_schedule_alone() -> None:
    # Rank 1 ends 2 s earlier than rank 0, which runs the last backward.
    for rank, waited in enumerate((3.0, 1.0)):
        idle = split_idle(CLOCK, rank, EVEN, [WINDOW, WINDOW - 2], waited)
        assert idle.bubble == idle.schedule == pytest.approx(1 / 5) == pytest.approx(idle.bound)
        assert idle.wait == idle.overhead == pytest.approx(0)


def test_a_late_neighbour_causes_waiting() -> None:
    idle = split_idle(CLOCK, 0, EVEN, [20.0, 18.0], waited=8.0)
    assert idle.parts == {
        "schedule": pytest.approx(3 / 20),
        "wait": pytest.approx(5 / 20),
        "overhead": pytest.approx(0),
    }


def test_time_after_the_last_action_is_waiting() -> None:
    idle = split_idle(CLOCK, 1, EVEN, [20.0, 13.0], waited=1.0)
    assert idle.schedule == pytest.approx(3 / 20) and idle.wait == pytest.approx(5 / 20)
    assert idle.overhead == pytest.approx(0)


def test_busy_time_between_actions_is_overhead() -> None:
    idle = split_idle(CLOCK, 0, EVEN, [20.0, 18.0], waited=3.0)
    assert idle.parts == {
        "schedule": pytest.approx(3 / 20),
        "wait": pytest.approx(0),
        "overhead": pytest.approx(5 / 20),
    }


@settings(deadline=None)
@given(st.data())
def test_the_parts_always_add_up(data: st.DataObject) -> None:
    name, v = data.draw(st.sampled_from([("gpipe", 1), ("interleaved_zb", 2), ("zbv", 2), ("dualpipev", 2)]))
    clock = ScheduleClock(name, 2, v, 4)
    times = st.floats(1e-3, 10)
    durations = [[data.draw(times) for _ in acts] for acts in clock.acts]
    windows = [sum(its) + data.draw(times) for its in durations]
    idle = split_idle(clock, 1, durations, windows, waited=data.draw(st.floats(-1, 30)))
    assert idle.bubble == pytest.approx(sum(idle.parts.values()), abs=1e-12)
    assert all(part >= 0 for part in idle.parts.values())
