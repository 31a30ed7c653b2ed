"""Fault 12 of docs/evidence/faults.md: the ranks' clocks are wrong by an hour, or jump back. The order of updates
depends on steps and sequence numbers, never on a clock."""

import time

import pytest
from msgspec import structs

from agents.client import Client
from agents.protocol import Event
from cockpit.data.log.run_log import log_entries
from cockpit.data.store import Store
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import Fleet, HubProcess, make_summary, poll_until

HOUR = 3600.0


class OffFleet(Fleet):
    """Ranks on machines whose clocks are wrong, so that every timestamp that they send is wrong."""

    def __init__(self, endpoint: str, off_s: float) -> None:
        self.began_s = time.time() + off_s  # as read from the ranks' clock
        self.off_s = off_s
        super().__init__(endpoint, 2)

    def introduce(self) -> None:
        introduce = {agent: agent.introduce for agent in self.agents}
        for agent in self.agents:
            agent.introduce = lambda hello, board, agent=agent: introduce[agent](  # type: ignore[method-assign, misc]
                structs.replace(hello, began_s=self.began_s), board
            )
            # An agent computes the age of its process from the clock of its machine, which is wrong.
            agent._outbox.began_s = time.monotonic() - max(0.0, time.time() + self.off_s - self.began_s)
        super().introduce()
        for agent in self.agents:
            agent.introduce = introduce[agent]  # type: ignore[method-assign]


@pytest.mark.parametrize("off_s", [HOUR, pytest.param(-HOUR, marks=pytest.mark.exhaustive)])
def test_a_command_survives_a_hub_restart_with_wrong_clocks(
    off_s: float, own_hub: HubProcess, opened: Opened
) -> None:
    """Even if the leader's clock is wrong, a restarted hub must not conclude that a command was proposed before the
    leader's process started."""
    fleet, client = (
        opened(OffFleet(own_hub.endpoints.ranks, off_s)),
        opened(Client(own_hub.endpoints.clients)),
    )
    poll_until(client, lambda: client.state.board)
    first = client.propose({"micro_batches": 8})
    poll_until(
        client, lambda: client.state.commands.get(first) and client.state.commands[first].settled, fleet.turn
    )
    asked = client.propose({"recompute": "full"})
    # Accepted; it waits, because the ranks do not train now.
    poll_until(client, lambda: asked in client.state.commands)
    assert client.state.commands[asked].state == "accepted"
    own_hub.kill()
    own_hub.start()
    resets = client.resets
    poll_until(client, lambda: client.resets > resets and len(client.state.hellos) == 2)
    poll_until(
        client,
        lambda: asked in client.state.commands and client.state.commands[asked].state != "accepted",
        fleet.turn,
    )
    assert client.state.commands[asked].state == "applied"
    assert client.state.commands[first].state == "applied"  # not rolled back either
    assert abs(client.state.hellos[0].began_s - time.time()) < HOUR / 2


@pytest.mark.parametrize("off_s", [HOUR, -HOUR])
def test_the_log_is_in_order_of_events(off_s: float, own_hub: HubProcess, opened: Opened) -> None:
    fleet, client = (
        opened(OffFleet(own_hub.endpoints.ranks, off_s)),
        opened(Client(own_hub.endpoints.clients)),
    )
    poll_until(client, lambda: client.state.board)
    said = ["first", "second", "third"]
    for text in said:
        fleet.agents[1].send(Event(time.time() + off_s, "info", "", text))
        asked = client.propose({"micro_batches": 8 if said.index(text) % 2 == 0 else 4})
        poll_until(
            client,
            lambda asked=asked: asked in client.state.commands and client.state.commands[asked].settled,  # type: ignore[misc]
            fleet.turn,
        )
    store = Store()
    store.apply(client.state.replay())
    order = [entry.text for entry in log_entries(store)]
    places = [order.index(text) for text in said]
    changes = [place for place, text in enumerate(order) if "applied" in text]
    assert len(changes) == 3
    assert [place for pair in zip(places, changes, strict=True) for place in pair] == sorted(places + changes)


def test_steps_are_in_order_after_a_clock_reset(own_hub: HubProcess, opened: Opened) -> None:
    fleet, client = opened(Fleet(own_hub.endpoints.ranks)), opened(Client(own_hub.endpoints.clients))
    for step in range(1, 6):
        clock = 1e9 - HOUR * step
        fleet.agents[0].send(structs.replace(make_summary(step), time_s=clock))
    poll_until(client, lambda: len(client.state.summaries) == 5)
    assert [summary.step for summary in client.state.summaries] == [1, 2, 3, 4, 5]
