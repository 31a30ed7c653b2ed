"""A hub that was killed and restarted still has the checks of earlier previews against measurements, because they are
events in the run's log."""

from agents.client import Client
from agents.protocol import Event
from agents.state.preview_checks import Check, check_event, trust
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import Fleet, HubProcess, poll_until

CHECK = Check("step_ms", 100.0, 80.0, 70.0, 90.0, 85.0)


def checked(events: object) -> bool:
    return bool(trust(events))  # type: ignore[arg-type]


def test_a_restarted_hub_has_the_checks(own_hub: HubProcess, opened: Opened) -> None:
    client = opened(Client(own_hub.endpoints.clients))
    fleet = opened(Fleet(own_hub.endpoints.ranks))
    poll_until(client, lambda: client.state.board and len(client.state.hellos) == 4, fleet.turn)
    event = check_event(1.0, 3, {"recompute": ("none", "full")}, [CHECK])
    fleet.agents[0].send(event)
    poll_until(client, lambda: checked(client.state.events), fleet.turn)
    recorded = own_hub.folder / "run.db"
    epoch, steps = client.epoch, fleet.step
    # the event is on disk by then
    poll_until(client, lambda: recorded.exists() and fleet.step > steps + 100, fleet.turn)
    own_hub.kill()
    own_hub.start()
    poll_until(client, lambda: client.epoch not in ("", epoch) and checked(client.state.events), fleet.turn)
    found = trust(client.state.events)["step_ms"]
    assert (found.checks, found.hits) == (1, 1)


def test_the_event_reads_as_a_sentence() -> None:
    event: Event = check_event(1.0, 3, {"recompute": ("none", "full")}, [CHECK])
    assert event.text == "preview of recompute none→full checked: step_ms 85 in 70 .. 90"
