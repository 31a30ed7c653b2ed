"""At each sequence number, a replay gives the state of a subscriber that missed no update."""

import random
from pathlib import Path

from agents.client import Client
from agents.protocol import AnyMessage, Update, Updates
from agents.recording.format import RecordingError
from agents.recording.reader import Recording
from agents.recording.replay import Replay
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import Fleet, HubProcess, poll_until
from tests.unit.agents.recorder_run import digest

Place = tuple[str, int]


class Lossless(Client):
    """A subscriber that stores its state at every sequence number."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.seen: dict[Place, list[bytes]] = {}

    def _take(self, message: AnyMessage, applied: list[Update]) -> None:
        if isinstance(message, Updates) and not message.snapshot and len(message.updates) > 1:
            first = message.seq - len(message.updates) + 1
            for seq, update in enumerate(message.updates, first):
                self._take(Updates(message.epoch, seq, [update]), applied)
            return
        super()._take(message, applied)
        if self.epoch:
            self.seen.setdefault((self.epoch, self.seq), digest(self.state))


def replayed(path: Path) -> dict[Place, list[bytes]]:
    """The state at every sequence number of a recording, from its beginning to its end."""
    replay = Replay(Recording(path))
    states = {(replay.epoch, replay.seq): digest(replay.state)}
    while not replay.ended:
        before = (replay.epoch, replay.seq)
        steps = iter((False, True))
        replay.forward(lambda _, steps=steps: next(steps))
        now = (replay.epoch, replay.seq)
        assert now not in states or now == before, "a segment's snapshot equals the state at that number"
        states[now] = digest(replay.state)
    return states


def recorded(path: Path) -> int:
    """The newest recorded sequence number."""
    try:
        recording = Recording(path)
    except RecordingError:
        return 0
    try:
        return recording.span().last_seq
    finally:
        recording.close()


def test_a_replay_equals_a_subscriber_that_lost_nothing(own_hub: HubProcess, opened: Opened) -> None:
    client = opened(Lossless(own_hub.endpoints.clients))
    fleet = opened(Fleet(own_hub.endpoints.ranks))
    poll_until(client, lambda: client.state.board and len(client.state.hellos) == 4, fleet.turn)
    change = client.propose({"micro_batches": 8})
    poll_until(
        client, lambda: change in client.state.commands and client.state.commands[change].settled, fleet.turn
    )
    path = own_hub.folder / "run.db"
    first_epoch, settled = client.epoch, client.seq
    poll_until(client, lambda: recorded(path) >= settled, fleet.turn)
    began = client.state.summaries[0].step
    own_hub.kill()
    own_hub.start()
    poll_until(client, lambda: client.epoch not in ("", first_epoch) and client.state.board, fleet.turn)
    # The history of the previous hub is published with a sequence number, so it is recorded.
    poll_until(client, lambda: client.state.summaries and client.state.summaries[0].step == began, fleet.turn)
    step = fleet.step
    poll_until(
        client, lambda: fleet.step > step + 20 and client.state.summaries[-1].step == fleet.step, fleet.turn
    )
    fleet.close()
    poll_until(client, lambda: len(client.state.gone) == 4)
    assert own_hub.stop() == 0
    poll_until(client, lambda: any(event.text == "the hub has ended" for event in client.state.events))

    states = replayed(path)
    common = client.seen.keys() & states.keys()
    # A killed hub loses the last half second of its recording.
    assert {epoch for epoch, _ in common} == {first_epoch, client.epoch}
    assert {seen for seen in client.seen if seen[0] == client.epoch} <= common
    assert [place for place in common if states[place] != client.seen[place]] == []

    replay = Replay(Recording(path))
    for epoch, seq in random.Random(1).sample(sorted(common), 20):
        replay.seek(replay.recording.at_seq(seq, epoch))
        assert digest(replay.state) == client.seen[epoch, seq]
    replay.seek(replay.recording.at_end())
    assert digest(replay.state) == digest(client.state)
