"""Fault 7 of docs/evidence/faults.md: malformed frames are sent to both sockets of a real hub. The sender gets a
one-sentence error message, and there is no other effect."""

from collections.abc import Iterator

import msgpack
import psutil
import pytest

from agents import protocol
from agents.client import Client
from agents.hub.client_requests import CLIENT_FRAME_BYTES
from agents.protocol import Refused
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import Fleet, HubProcess, Peer, make_hello, make_step, poll_until

pytestmark = pytest.mark.xdist_group("malformed_frames")  # its tests share a fixture

DEEP = b"\x91" * 200_000 + b"\xc0"
NOT_OURS = "not a frame of this protocol: "


def packed(*message: object) -> bytes:
    return msgpack.packb([protocol.VERSION, [message]])  # type: ignore[no-any-return]


def twice(kind: str) -> bytes:
    """A packed message whose changes contain a knob twice; no correct encoder writes this."""
    head = b"\x92\x01\x91\x93" + msgpack.packb(kind) + msgpack.packb("id")
    return (
        head + b"\x82" + b"".join(msgpack.packb("micro_batches") + msgpack.packb(value) for value in (2, 8))
    )


FRAMES = {
    "depth 200k": (DEEP, NOT_OURS),
    "depth 200k in a value": (b"\x92\x01\x91\x93\xa7propose\xa1a\x81\xa1k" + DEEP, NOT_OURS),
    "depth 200k in a field of the future": (b"\x92\x01\x91\x95\xa5peers\x01\x05\x90" + DEEP, NOT_OURS),
    "lying length of an array": (b"\x92\x01\xdd\xff\xff\xff\xff", NOT_OURS),
    "lying length of a map": (b"\x92\x01\x91\x93\xa7propose\xa1a\xdf\xff\xff\xff\xff", NOT_OURS),
    "lying length of a text": (b"\x92\x01\x91\x93\xa7propose\xdb\xff\xff\xff\xffa", NOT_OURS),
    "trailing bytes": (b"\x92\x01\x90zzz", NOT_OURS),
    "wrong type": (packed("propose", 7, {}), NOT_OURS),
    "a kind that is no text": (packed(7, 1), NOT_OURS),
    "2^64-1": (packed("credit", protocol.VERSION, "", 2**64 - 1, 1), NOT_OURS),
    "2^64-1 as a rank": (packed("gone", 2**64 - 1, True), NOT_OURS),
    "negative": (packed("credit", protocol.VERSION, "", -1, 1), NOT_OURS),
    "NaN": (
        packed("propose", "a", {"micro_batches": float("nan")}),
        "micro_batches = nan is not a legal value",
    ),
    "infinity": (packed("propose", "a", {"a": 1, "lr": float("inf")}), "lr = inf is not a legal value"),
    "duplicate keys": (twice("propose"), "a change names a knob twice"),
}


@pytest.fixture(scope="module")
def followed(hub: HubProcess, fleet: Fleet) -> Iterator[Client]:
    client = Client(hub.endpoints.clients)
    poll_until(client, lambda: client.state.board and client.state.steps, fleet.turn)
    yield client
    client.close()


def cpu_s(hub: HubProcess) -> float:
    """CPU seconds of the hub so far. Unlike the response time, the CPU time does not grow while other processes keep
    the cores busy."""
    times = psutil.Process(hub.process.pid).cpu_times()
    return times.user + times.system


@pytest.mark.parametrize(("frame", "sentence"), FRAMES.values(), ids=FRAMES.keys())
def test_malformed_frames_get_one_sentence(
    frame: bytes, sentence: str, hub: HubProcess, fleet: Fleet, followed: Client, opened: Opened
) -> None:
    for endpoint in (hub.endpoints.ranks, hub.endpoints.clients):
        peer = opened(Peer(endpoint))
        began_s = cpu_s(hub)
        peer.dealer.send(frame)
        refused = peer.hear(Refused)
        large = endpoint == hub.endpoints.clients and len(frame) > CLIENT_FRAME_BYTES
        why = "a client's frame has at most" if large else sentence
        assert isinstance(refused, Refused) and why in refused.why and "\n" not in refused.why
        assert len(refused.why) < 300 and cpu_s(hub) - began_s < 1
    step = fleet.step
    poll_until(followed, lambda: followed.state.steps[0].step > step, fleet.turn)
    assert followed.resets == 1 and not followed.state.commands and hub.process.poll() is None
    assert followed.state.board is not None and followed.state.board.revision == 0


def test_invalid_numbers_are_rejected(hub: HubProcess, fleet: Fleet, opened: Opened) -> None:
    """A rank of the run sends a well-formed frame that contains one invalid number."""
    client, rank = opened(Client(hub.endpoints.clients)), opened(Peer(hub.endpoints.ranks))
    poll_until(client, lambda: client.state.steps, fleet.turn)
    nan = float("nan")
    rank.say(make_hello(3, 4, began_s=nan))
    assert "rank 3 began at nan" in rank.hear(Refused).why  # type: ignore[union-attr]
    rank.say(make_hello(3, 4))  # from the same process, so this connection replaces that of the fleet's rank
    step = make_step(3, 2**52)
    for wrong in ({"step_ms": nan}, {"phases": {"forward": float("inf")}}, {"bubble": nan}):
        rank.dealer.send(packed(*({"tag": "step"} | _fields(step) | wrong).values()))
    poll_until(client, lambda: any("not finite" in event.text for event in client.state.events), fleet.turn)
    assert client.state.steps[3].step < 2**52


def _fields(message: protocol.Step) -> dict[str, object]:
    comm = {axis: [traffic.bytes, traffic.ms, traffic.exposed_ms] for axis, traffic in message.comm.items()}
    return {name: getattr(message, name) for name in message.__struct_fields__} | {"comm": comm}


def test_a_client_is_refused_before_it_sends(hub: HubProcess, opened: Opened) -> None:
    client = opened(Client(hub.endpoints.clients))
    with pytest.raises(ValueError, match="lr = nan is not a legal value of a knob"):
        client.propose({"lr": float("nan")})
