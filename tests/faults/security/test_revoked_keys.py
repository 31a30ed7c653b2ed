"""A key is revoked while its holder is connected, or the hub cannot trust its list of keys (fault 11 of
docs/evidence/faults.md)."""

import time

import pytest

from agents import protocol
from agents.client import Client
from agents.protocol import Credit, Propose, Refused, Updates
from agents.rank.agent import Agent
from agents.transport.curve_keys import LIST_FILE
from agents.transport.roles import Role
from tests.faults.conftest import Opened
from tests.faults.guarded import Guarded, wait, watch
from tests.unit.agents.fleet import Peer, make_hello, poll_until

pytestmark = pytest.mark.xdist_group("revoked keys")  # the tests of this file share a fixture


def test_a_key_revoked_on_an_open_connection(guarded: Guarded, opened: Opened) -> None:
    viewer, staying = guarded.make("carl", Role.VIEWER), watch(guarded, opened)
    client = watch(guarded, opened, viewer)
    guarded.store.revoke("carl")
    poll_until(client, lambda: client.refused, guarded.fleet.turn)
    assert client.refused and "the key of this connection is no longer valid for watching" in client.refused
    seq, step = client.seq, guarded.fleet.step
    poll_until(staying, lambda: staying.state.steps[0].step > step + 20, guarded.fleet.turn)
    client.poll(0.1)
    assert client.seq == seq, "not an update more"
    late = opened(Client(guarded.url, viewer))
    poll_until(late, lambda: late.refused, guarded.fleet.turn)
    assert late.refused and "refuses the key carl: it is revoked" in late.refused


def test_an_operator_revoked_on_an_open_connection_changes_nothing(guarded: Guarded, opened: Opened) -> None:
    key = guarded.make("dora", Role.OPERATOR)
    watch(guarded, opened)
    peer = opened(Peer(guarded.url, key))
    peer.say(Credit(protocol.VERSION, "", 0, 8))
    assert isinstance(peer.hear(Updates), Updates)
    before = list(guarded.fleet.carried_out)
    guarded.store.revoke("dora")
    refused = peer.hear(Refused)  # the hub sends this without a request
    peer.say(Propose("after-all", {"micro_batches": 1}))
    refused = peer.hear(Refused)
    assert isinstance(refused, Refused) and "the key dora is no longer in force" in refused.why
    step = guarded.fleet.step
    client = watch(guarded, opened)
    poll_until(client, lambda: client.state.steps[0].step > step + 10, guarded.fleet.turn)
    assert "after-all" not in client.state.commands and guarded.fleet.carried_out == before


def test_a_rank_revoked_on_an_open_connection_is_refused(guarded: Guarded, opened: Opened) -> None:
    """The rank keeps training, and its agent reports why it is refused. With a new key, the rank can send again."""
    own = guarded.make("node-2", Role.RANK)
    run = opened(Agent(guarded.url, lambda: (3, "", time.monotonic()), key=own))
    run.introduce(make_hello(3, 4), None)
    guarded.fleet.agents[3].close()
    client = watch(guarded, opened)
    poll_until(client, lambda: client.state.pulses[3].step == 3)
    guarded.store.revoke("node-2")
    wait(lambda: run.refused)
    assert run.refused == "the key node-2 is no longer in force; ask the owner of the run for another key"
    known = client.state.pulses[3]
    step = guarded.fleet.step
    poll_until(client, lambda: client.state.steps[0].step > step + 50, guarded.fleet.turn)
    assert client.state.pulses[3] is known, "no further message"
    again = Agent(guarded.url, lambda: (guarded.fleet.step, "", time.monotonic()), key=guarded.rank)
    guarded.fleet.agents[3] = again
    guarded.fleet.introduce()
    poll_until(client, lambda: client.state.steps[3].step > step + 50, guarded.fleet.turn)


def test_an_untrusted_list_admits_nobody(
    guarded: Guarded, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.transport.reconnecting.RECONNECT_S", 0.2)
    monkeypatch.setattr("agents.client.SILENCE_S", 0.5)
    client = watch(guarded, opened)
    path = guarded.store.folder / LIST_FILE
    path.chmod(0o666)
    try:
        poll_until(client, lambda: client.refused, guarded.fleet.turn)
        late = opened(Client(guarded.url, guarded.operator))
        poll_until(late, lambda: late.refused, guarded.fleet.turn)
    finally:
        path.chmod(0o600)
    step = guarded.fleet.step
    poll_until(client, lambda: client.state.steps[0].step > step + 5, guarded.fleet.turn)
    poll_until(late, lambda: late.refused is None and late.resets, guarded.fleet.turn)
