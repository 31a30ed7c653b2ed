"""Fault 2: a suspended rank is reported as suspended, not dead, and recovers by itself."""

import signal

from agents.client import Client
from cockpit.data.diagnosis.diagnosis import diagnosis
from cockpit.data.link import LinkState
from cockpit.data.store import Store
from tests.faults.rank import RankProcess
from tests.faults.scaled import program
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import HubProcess, poll_until

QUICK = {"agents.hub.telemetry.membership.LOST_AFTER_S": 1.5, "agents.hub.server.TICK_S": 0.1}


def as_seen(client: Client) -> Store:
    store = Store()
    store.rebuild(list(client.state.replay()))
    store.set_message_age(0.0)
    return store


def test_suspended_is_not_dead(own_hub: HubProcess, opened: Opened) -> None:
    own_hub.kill()
    own_hub.program = program("agents.hub.process", QUICK)
    own_hub.start()
    client = opened(Client(own_hub.endpoints.clients))
    ranks = [opened(RankProcess(own_hub.endpoints.ranks, rank, 2)) for rank in range(2)]
    poll_until(client, lambda: len(client.state.steps) == 2 and client.state.board)

    ranks[1].signal(signal.SIGSTOP)
    poll_until(client, lambda: client.state.gone)
    gone = client.state.gone[1]
    assert (gone.clean, gone.process, gone.over) == (False, "stopped", False)
    assert gone.text.endswith(f"process {ranks[1].process.pid} is suspended (kill -CONT resumes it)")
    assert "suspended" in diagnosis(as_seen(client)).text and as_seen(client).link is LinkState.LIVE
    step = client.state.steps[0].step
    poll_until(client, lambda: client.state.steps[0].step > step + 5)  # the others continue

    ranks[1].signal(signal.SIGCONT)
    poll_until(client, lambda: not client.state.gone)
    step = client.state.steps[1].step
    poll_until(client, lambda: client.state.steps[1].step > step)
    poll_until(
        client,
        lambda: any(
            event.text.startswith("rank 1 ") and event.text.endswith("sends again")
            for event in client.state.events
        ),
    )

    for rank in ranks:  # if all ranks are suspended, the run has still not ended
        rank.signal(signal.SIGSTOP)
    poll_until(client, lambda: len(client.state.gone) == 2)
    assert as_seen(client).link is LinkState.LIVE

    ranks[1].process.kill()  # a rank that is killed while it is suspended counts as ended
    poll_until(client, lambda: client.state.gone[1].process == "ended")
    assert client.state.gone[1].over and not client.state.gone[0].over
    ranks[0].process.kill()
    poll_until(client, lambda: client.state.gone[0].over)
    assert as_seen(client).link is LinkState.FAILED
    assert own_hub.process.poll() is None
