"""Membership: which connection may send messages in the name of which rank, and when a rank counts as lost."""

import os
import signal
import subprocess

import pytest
from msgspec import structs

from agents.hub.telemetry.membership import LARGEST_WORLD, LOST_AFTER_S, Known, Membership
from agents.protocol import VERSION, Relay
from agents.rundir.local_machine import process_start, this_host
from tests.unit.agents.fleet import make_hello


@pytest.fixture
def membership() -> Membership:
    membership = Membership("r")
    assert membership.hello(b"a", make_hello(0, 4), 0.0) is None
    return membership


def on(membership: Membership, identity: bytes, rank: int) -> Known:
    """The membership entry for `rank` on the connection `identity`."""
    connection = membership.connection(identity)
    assert connection is not None
    return connection.ranks[rank]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"run": "other"}, "belongs to run other, but this hub serves run r"),
        ({"world": 8}, "has a world of 8 ranks, but this run has 4"),
        ({"layout": "x"}, "give all ranks the same layout"),
        ({"rank": 4}, "rank 4 of a world of 4 is not legal"),
        ({"world": LARGEST_WORLD + 1}, "is not legal; legal"),
        ({"version": 9}, "protocol version 9, this side has 1"),
        ({"began_s": float("nan")}, "rank 1 began at nan, which is not a valid time"),
        ({"revision": 2**53}, "reports knob revision"),
        ({"leader": True}, "claims to be the leader, but rank 0 leads"),
        ({"rank": 0, "leader": True, "pid": 1}, "already connected, as process"),
    ],
)
def test_a_foreign_rank_is_refused_with_the_reason(
    membership: Membership, fields: dict[str, object], sentence: str
) -> None:
    refusal = membership.hello(b"b", make_hello(**({"rank": 1, "world": 4} | fields)), 0.0)  # type: ignore[arg-type]
    assert refusal is not None and sentence in refusal
    assert membership.connection(b"b") is None


def test_one_connection_is_one_rank(membership: Membership) -> None:
    assert "on the connection of rank 0" in (membership.hello(b"a", make_hello(1, 4), 0.0) or "")


def test_a_silent_rank_is_lost_once_and_returns(membership: Membership) -> None:
    membership.hello(b"b", make_hello(1, 4), 0.0)
    assert not on(membership, b"b", 1).mark_heard(4.0)
    lost = membership.newly_lost(LOST_AFTER_S + 0.1)
    assert [(gone.rank, gone.clean) for gone in lost] == [(0, False)]
    assert f"process {os.getpid()} is alive but silent" in lost[0].text
    assert lost[0].process == "alive" and not lost[0].over
    assert membership.newly_lost(LOST_AFTER_S + 0.2) == [] and membership.leader is None
    assert on(membership, b"a", 0).mark_heard(7.0) and not on(membership, b"a", 0).mark_heard(7.0)
    assert membership.leader is not None


def test_a_lost_rank_is_reported_again_when_its_process_state_changes() -> None:
    membership = Membership("r")
    process = subprocess.Popen(["sleep", "60"])
    try:
        membership.hello(b"a", make_hello(0, 2, pid=process.pid), 0.0)
        membership.hello(b"b", make_hello(1, 2, machine="another.machine.1"), 0.0)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        fates = [(gone.process, gone.over) for gone in membership.newly_lost(LOST_AFTER_S + 0.1)]
        assert fates == [("stopped", False), ("unknown", False)]
        assert membership.newly_lost(LOST_AFTER_S + 0.2) == []
        process.kill()
        process.wait()
        (gone,) = membership.newly_lost(LOST_AFTER_S + 0.3)
        assert (gone.rank, gone.process, gone.over) == (0, "ended", True)
        assert membership.newly_lost(LOST_AFTER_S + 0.4) == []
    finally:
        process.kill()


def test_a_restarted_rank_replaces_its_silent_predecessor(membership: Membership) -> None:
    anew = make_hello(0, 4, pid=1)
    assert membership.hello(b"b", anew, 3.0) is None
    assert membership.connection(b"a") is None
    assert on(membership, b"b", 0).hello == anew


def test_the_same_process_may_reconnect_at_once(membership: Membership) -> None:
    assert membership.hello(b"b", make_hello(0, 4), 0.1) is None
    assert membership.identity(0) == b"b"


def test_a_returning_leader_does_not_lead_if_replaced() -> None:
    """If two ranks claim to lead, the rank accepted last is the leader."""
    membership = Membership("r")
    membership.hello(b"a", make_hello(0, 2), 0.0)
    membership.newly_lost(LOST_AFTER_S + 0.1)
    assert membership.hello(b"b", make_hello(1, 2, leader=True), LOST_AFTER_S + 0.2) is None
    assert membership.leader is not None and (membership.leader.rank, membership.last_leader) == (1, 1)
    assert on(membership, b"a", 0).mark_heard(7.0) and not on(membership, b"a", 0).hello.leader
    assert membership.leader.rank == 1
    assert "rank 1 leads this run" in (membership.hello(b"a", make_hello(0, 2), 7.0) or "")
    membership.leave(1)
    assert membership.leader is None and membership.last_leader == 1


def test_ranks_that_start_again_replace_all_earlier_ones(membership: Membership) -> None:
    again = structs.replace(make_hello(0, 2), restarts=1, layout="another", pid=7)
    membership.hello(b"b", make_hello(1, 4), 0.0)
    assert membership.hello(b"c", again, 0.1) is None
    assert (membership.world, membership.connection(b"a"), membership.newly_lost(99.0)[1:]) == (2, None, [])
    assert "is from start 0, but the ranks are now in start" in (
        membership.hello(b"b", make_hello(1, 4), 0.2) or ""
    )
    assert membership.world == 2


def test_two_machines_with_one_name_are_two_machines() -> None:
    """On the second machine, rank 1 has the process id of a process that has ended on the hub's machine."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    membership = Membership("r")
    membership.hello(b"a", make_hello(0, 3), 0.0)
    elsewhere = {"pid": ended.pid, "machine": "another.machine.1"}
    membership.hello(b"b", make_hello(1, 3, **elsewhere), 0.0)
    membership.hello(b"c", make_hello(2, 3, **elsewhere | {"machine": "another.machine.2"}), 0.0)
    here, there, container = (membership.hello_of(rank).host for rank in range(3))
    assert here == this_host() and there == container == f"{here}#2"
    lost = {gone.rank: gone for gone in membership.newly_lost(LOST_AFTER_S + 0.1)}
    assert (lost[0].process, lost[1].process) == ("alive", "unknown")
    assert lost[1].text.endswith(f"on {here}#2; the hub cannot check whether it is alive")


@pytest.mark.parametrize("fields", [{"machine": "another.machine.1"}, {"process_start": 7}])
def test_a_process_id_is_not_a_process(membership: Membership, fields: dict[str, object]) -> None:
    membership.hello(b"b", make_hello(1, 4, process_start=5), 0.0)
    refusal = membership.hello(b"c", make_hello(1, 4, **fields), 0.1)
    assert refusal is not None and "rank 1 is already connected, as process" in refusal


def test_a_later_process_with_the_id_of_a_rank_is_another_process(membership: Membership) -> None:
    start = process_start(os.getpid())
    membership.hello(b"b", make_hello(1, 4, process_start=start), 0.0)
    membership.hello(b"c", make_hello(2, 4, process_start=start + 1), 0.0)
    lost = {gone.rank: gone.process for gone in membership.newly_lost(LOST_AFTER_S + 0.1)}
    assert (lost[1], lost[2]) == ("alive", "ended")


def test_a_new_launcher_counts_restarts_from_0_again(membership: Membership) -> None:
    """A hub that outlives a run with a restart accepts the resumed run, once the ranks from before have left."""
    before = structs.replace(make_hello(0, 2), restarts=2, began_s=100.0)
    resumed = structs.replace(make_hello(1, 4, leader=False), pid=7, layout="another", began_s=200.0)
    assert membership.hello(b"c", before, 0.1) is None
    assert "is from start 0, but" in (membership.hello(b"d", resumed, 0.2) or "")
    membership.leave(0)
    assert "is from start 0, but" in (
        membership.hello(b"d", structs.replace(resumed, began_s=50.0), 0.3) or ""
    )
    assert membership.hello(b"d", resumed, 0.4) is None
    assert (membership.world, membership.connection(b"c")) == (4, None)


def test_all_relays_of_a_large_job_may_connect_before_its_ranks() -> None:
    membership = Membership("r")
    relays = [b"relay %d" % node for node in range(2048)]
    for node, identity in enumerate(relays):
        assert membership.relay(identity, Relay(VERSION, "r", f"n{node}", 1)) is None
    for node, identity in enumerate(relays):
        for rank in range(8 * node, 8 * node + 2):
            assert membership.hello(identity, make_hello(rank, 16_384), 0.0) is None
    connection = membership.connection(relays[0])
    assert connection and connection.relay and [*connection.ranks] == [0, 1]
