"""The forwarder of the fault tests behaves like a network link."""

from agents.client import Client
from tests.faults.forwarder import Forwarder
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import Fleet, HubProcess, poll_until


def test_a_cut_link_holds_bytes_and_a_torn_one_reconnects(own_hub: HubProcess, opened: Opened) -> None:
    cable = opened(Forwarder(own_hub.endpoints.ranks))
    client, fleet = opened(Client(own_hub.endpoints.clients)), opened(Fleet(cable.endpoint, 2))
    poll_until(client, lambda: client.state.summaries, fleet.turn)
    cable.cut()
    client.poll(0.3)  # the bytes in transit
    before, step = client.state.summaries[-1].step, fleet.step
    for _ in range(5):
        fleet.turn()
        client.poll(0.05)
    assert client.state.summaries[-1].step == before <= step
    cable.heal()
    poll_until(client, lambda: client.state.summaries[-1].step == fleet.step)
    cable.tear()
    poll_until(client, lambda: client.state.summaries[-1].step > fleet.step - 3, fleet.turn)
