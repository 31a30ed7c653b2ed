"""The state of a run, computed from its updates: a replay of the updates rebuilds an equal state, and the state has a
bounded size."""

from itertools import pairwise
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import protocol
from agents.protocol import CommandState, Event, Gone, Hello, Pulse, Recalled, Summary, TrialState, Update
from agents.state.metric_curves import BUCKETS
from agents.state.run_state import COMMANDS, HISTORY, RunState
from tests.unit.agents.fleet import make_hello, make_step, make_summary

RANKS = st.integers(0, 3)
STEPS = st.integers(0, 40)
UPDATES = st.one_of(
    st.builds(lambda rank: make_hello(rank, 4), RANKS),
    st.builds(make_step, RANKS, STEPS),
    st.builds(make_summary, STEPS),
    st.builds(lambda rank, step: Pulse(rank, step, "forward", 1.0), RANKS, STEPS),
    st.builds(lambda rank, clean: Gone(rank, clean), RANKS, st.booleans()),
    st.builds(lambda step: protocol.Timeline(0, step, 1.0, [protocol.Action("F", 0, 0.0, 1.0)]), STEPS),
    st.builds(lambda rank, step: protocol.Peers(rank, step, [protocol.ToPeer(3, step)]), RANKS, STEPS),
    st.builds(lambda step: protocol.Experts(step, [protocol.LayerLoad(0, [1, 2], 0)]), STEPS),
    st.builds(lambda step: protocol.Loads(step, []), STEPS),
    st.builds(lambda rank, step: protocol.Vitals(rank, step, temperature_c=40.0), RANKS, STEPS),
    st.builds(lambda n: protocol.Board(0, n, "d", []), STEPS),
    st.builds(lambda n: Event(float(n), "info", "hub", "text"), STEPS),
    st.builds(
        lambda n, active: protocol.Alert("stall", f"rank {n % 3}", "error", active, n, 0.0, "text"),
        STEPS,
        st.booleans(),
    ),
    st.builds(lambda n: CommandState(f"c{n}", n, "accepted", {}, {}, "me", 0.0), STEPS),
)


def rebuilt(state: RunState) -> RunState:
    other = RunState()
    for update in state.replay():
        other.apply(update)
    return other


@pytest.mark.parametrize("history", [HISTORY, 4])
@settings(max_examples=60, deadline=None)
@given(st.lists(UPDATES, max_size=60))
def test_a_replay_rebuilds_an_equal_state(history: int, updates: list[Update]) -> None:
    with (
        mock.patch("agents.state.run_state.HISTORY", history),
        mock.patch("agents.state.metric_curves.BUCKETS", history),
    ):
        state = RunState()
        for update in updates:
            state.apply(update)
        assert vars(rebuilt(state)) == vars(state)
        assert len(state.summaries) <= history


def lossy(step: int) -> Summary:
    """A summary of a run whose loss decreases linearly, except for one spike of +3."""
    return msgspec.structs.replace(make_summary(step), loss=5 - step / 20_000 + 3 * (step == 1234))


def test_a_long_run_is_bucketed_evenly_and_still_replays() -> None:
    state = RunState()
    for step in range(20_000):
        state.apply(lossy(step))
    assert [summary.step for summary in state.summaries] == list(range(20_000 - HISTORY, 20_000))
    points = state.points("loss")
    assert [points[0], points[-1]] == [(0, 5.0), (19_999, lossy(19_999).loss)]
    assert (1234, lossy(1234).loss) in points, "the spike of one step"
    steps = [step for step, _ in points]
    assert steps == sorted(set(steps)) and max(b - a for a, b in pairwise(steps)) < state.curve.width == 32
    assert len(points) < 5 * BUCKETS + HISTORY
    assert vars(rebuilt(state)) == vars(state)


def test_a_run_that_resumes_before_its_kept_summaries() -> None:
    state = RunState()
    for step in range(3000):
        state.apply(lossy(step))
    for step in range(1000, 1200):
        state.apply(msgspec.structs.replace(make_summary(step), loss=1.0))
    points = dict(state.points("loss"))
    assert max(points) == 1199 and all(points[step] == 1.0 for step in points if step >= 1000)
    assert all(points[step] == lossy(step).loss for step in points if step < 1000)
    assert vars(rebuilt(state)) == vars(state)


def test_a_repeated_step_replaces_all_later_ones() -> None:
    state = RunState()
    for step in (1, 2, 3):
        state.apply(make_summary(step))
    state.apply(msgspec.structs.replace(make_summary(2), loss=9.0))
    assert [(summary.step, summary.loss) for summary in state.summaries] == [(1, 2.0), (2, 9.0)]


def test_commands_are_bounded_and_an_unsettled_one_stays() -> None:
    state = RunState()
    state.apply(CommandState("waits", 1, "accepted", {}, {}, "", 0.0, world=4))
    for number in range(2 * COMMANDS):
        state.apply(CommandState(f"c{number}", 0, "rejected", {}, {}, "", 0.0))
    assert len(state.commands) == COMMANDS
    assert "waits" in state.commands and f"c{2 * COMMANDS - 1}" in state.commands


def test_a_hello_makes_a_lost_rank_present() -> None:
    state = RunState()
    hello: Hello = make_hello(2, 4)
    for update in (hello, Gone(2, clean=False)):
        state.apply(update)
    assert 2 in state.gone
    state.apply(hello)
    assert not state.gone and state.world == 4


def test_the_log_of_a_restarted_hub_is_in_time_order() -> None:
    """The hub publishes the commands of its journal, then the trials, and later the events of the recording."""

    def command(id: str, time_s: float) -> CommandState:
        return CommandState(id, 1, "applied", {}, {}, "", time_s)

    state = RunState()
    for update in (
        command("asked first, applied last", 100.0),
        command("rejected", 50.0),
        TrialState("t", "kept", {}, {}, 4, "", 75.0, True, 1.0),
        command("before the recording", 5.0),
    ):
        state.apply(update)
    assert [entry.time_s for entry in state.log()] == [5.0, 50.0, 75.0, 100.0], "without a recording"
    state.apply(Event(120.0, "info", "hub", "started again"))
    state.apply(Recalled(events=[Event(time_s, "info", "hub", "") for time_s in (60.0, 75.0, 80.0, 110.0)]))
    state.apply(Recalled(events=[Event(time_s, "info", "hub", "") for time_s in (10.0, 40.0, 55.0)]))
    times = [entry.time_s for entry in state.log()]
    assert times == [5.0, 10.0, 40.0, 50.0, 55.0, 60.0, 75.0, 75.0, 80.0, 100.0, 110.0, 120.0]
    rebuilt = RunState()
    for update in state.replay():
        rebuilt.apply(update)
    assert [entry.time_s for entry in rebuilt.log()] == times


def test_the_log_keeps_the_hubs_order_when_its_clock_jumps() -> None:
    state = RunState()
    told: list[Update] = [
        Event(100.0, "info", "hub", "first"),
        CommandState("a", 1, "applied", {}, {}, "", 101.0),
        Event(102.0, "info", "hub", "second"),
        CommandState("b", 2, "applied", {}, {}, "", 3.0),  # the clock was set back
        TrialState("t", "kept", {}, {}, 4, "", 4.0, True, 1.0),
        Event(5.0, "info", "hub", "third"),
        CommandState("c", 3, "applied", {}, {}, "", 6.0),
    ]
    for update in told:
        state.apply(update)
    assert list(state.log()) == told
    rebuilt = RunState()
    for update in state.replay():
        rebuilt.apply(update)
    assert list(rebuilt.log()) == told, "also for a late client"
    later = CommandState("a", 1, "rolled_back", {}, {}, "", 7.0)
    rebuilt.apply(later)
    assert list(rebuilt.log()) == [*told[:1], *told[2:], later], "at the position of its last publication"


def test_recalled_events_are_merged_with_the_journals_commands() -> None:
    state = RunState()
    commands = [
        CommandState(id, n, "applied", {}, {}, "", at) for id, n, at in (("a", 1, 10.0), ("b", 2, 30.0))
    ]
    for command in commands:
        state.apply(command)
    now = Event(50.0, "info", "hub", "now")
    state.apply(now)
    past = [Event(at, "info", "hub", "then") for at in (5.0, 20.0, 40.0)]
    state.apply(Recalled(events=past))
    assert list(state.log()) == [past[0], commands[0], past[1], commands[1], past[2], now]
