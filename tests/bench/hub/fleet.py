"""Simulates ranks cheaply: one process sends frames for thousands of ranks, and packs these frames in advance.

    python -m tests.bench.hub.fleet ENDPOINT WORLD FIRST LAST HZ [--relays=RANKS | --singly]

Ranks FIRST to LAST - 1 of a run of WORLD ranks send a hello and then HZ step records per second each, evenly spread
over time, until the process gets SIGTERM. Like an agent, each rank sends its step records in frames five times per
second; with `--singly`, it sends one frame per step record. `Step.step_ms` holds the send time (`time.monotonic()`,
ms), so that a receiver can compute the delay. With `--relays=8`, every 8 ranks send their records through one simulated
relay. Each relay sends frames as often as a real relay in a job of this size. In a relay's frame, only the first step
record contains the send time.
"""

import struct
import sys
import time
from collections.abc import Iterator, Sequence

import zmq

from agents import protocol
from agents.hub.relay.node import flush_s
from agents.protocol import Hello, Relay, Step, Traffic, codec
from agents.rank.hub_link import POLL_MS
from agents.transport.frame_filling import chunks

TICK_S = 0.005
AGENT_S = POLL_MS / 1000  # time between two frames of an agent
HEAR_S = 1.0  # time between two checks for messages from the hub, per rank
# placeholders for rank, step, seq and step_ms in the packed step
MARK = (
    0xA1B2C3D4,
    0xA2B2C3D4,
    0xA3B2C3D4,
    1e-300,
)


def make_hello(rank: int, world: int) -> Hello:
    coords = {"pp": rank // 64, "dp": rank // 8 % 8, "tp": rank % 8}
    return Hello(
        protocol.VERSION, "r", rank, world, coords, f"node{rank // 8}", 1, "cuda:0", "l", 0, 0, rank == 0
    )


def make_step() -> Step:
    """A step record as in a large run: the traffic on four axes, the times of four phases, and the bubble by cause."""
    comm = {axis: Traffic(1 << 20, 1.5, 0.25) for axis in ("dp", "tp", "pp", "ep")}
    phases = {"data": 0.1, "forward": 40.5, "backward": 81.25, "optimizer": 5.5}
    parts = {"schedule": 0.05, "wait": 0.03, "overhead": 0.02}
    return Step(*MARK[:3], 0, MARK[3], phases, 65536, comm, 1 << 20, 0.1, 0.09, 0, 1 << 35, 0, parts)  # type: ignore[misc]


class Template:
    """A packed step record in which the rank, the step, the sequence number and the time can be overwritten in
    place."""

    def __init__(self) -> None:
        self.packed = bytearray(codec.pack(make_step()))
        self._places = [self.packed.index(struct.pack(">I", mark)) for mark in MARK[:3]]
        self._time = self.packed.index(struct.pack(">d", MARK[3]))

    def fill(self, rank: int, step: int, time_ms: float) -> bytes:
        for place, value in zip(self._places, (rank, step, step), strict=True):
            struct.pack_into(">I", self.packed, place, value)
        struct.pack_into(">d", self.packed, self._time, time_ms)
        return bytes(self.packed)


class Batch:
    """The frame that a relay sends, with a few step records of each of its ranks. Two frames alternate, so that
    consecutive frames differ."""

    def __init__(self, template: Template, ranks: Sequence[int], steps: int) -> None:
        others = [template.fill(rank, 0, 0.0) for rank in (list(ranks) * steps)[1:]]
        self._frames = [
            bytearray(codec.frame([template.fill(ranks[0], step, MARK[3]), *others])) for step in (1, 2)
        ]
        self._time = self._frames[0].index(struct.pack(">d", MARK[3]))

    def frame(self, step: int) -> bytes:
        frame = self._frames[step % 2]
        struct.pack_into(">d", frame, self._time, time.monotonic() * 1e3)
        return bytes(frame)


class Sender:
    """A connection to the hub, either from one rank or from one relay that serves the ranks of its node."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.dealer = context.socket(zmq.DEALER)
        for option, value in (  # the same socket options as in agents/rank/hub_link.py
            (zmq.IMMEDIATE, 1),
            (zmq.SNDHWM, 16),
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2000),
        ):
            self.dealer.set(option, value)
        self.dealer.connect(endpoint)
        self.sent = 0

    def send(self, frame: bytes) -> bool:
        try:
            self.dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.sent += 1
        return True

    def is_asked(self) -> bool:
        """Whether the hub has requested a hello message; in this benchmark the hub sends no other messages."""
        asked = False
        while self.dealer.get(zmq.EVENTS) & zmq.POLLIN:
            self.dealer.recv()
            asked = True
        return asked


def introductions(ranks: Sequence[int], world: int, relay: bool) -> Iterator[bytes]:
    me = codec.pack(Relay(protocol.VERSION, "r", f"node{ranks[0]}", 1)) if relay else b""
    for chunk in chunks((codec.pack(make_hello(rank, world)) for rank in ranks), me):
        yield codec.frame(chunk)


def main(endpoint: str, world: int, first: int, last: int, hz: float, relays: int, singly: bool) -> None:
    """`relays`: number of ranks per relay; with 0, the ranks connect directly to the hub."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 20_000)
    size = relays or 1
    groups = [range(start, min(start + size, last)) for start in range(first, last, size)]
    senders = [Sender(context, endpoint) for _ in groups]
    known = [False] * len(groups)
    template = Template()
    interval_s = flush_s(world, relays) if relays else AGENT_S
    steps_a_frame = 1 if singly else max(1, round(hz * interval_s))
    batches = [Batch(template, group, steps_a_frame) for group in groups] if relays else []
    hz /= steps_a_frame
    hear_every = max(1, round(HEAR_S * hz))
    began = time.monotonic()
    turn = 0  # number of sends that are due so far, over all connections
    while True:
        due = int((time.monotonic() - began) * hz * len(groups))
        while turn < due:
            place, step = turn % len(groups), turn // len(groups)
            turn += 1
            sender, group = senders[place], groups[place]
            if (step + place) % hear_every == 0 and sender.is_asked():
                known[place] = False
            if not known[place]:
                known[place] = all(sender.send(frame) for frame in introductions(group, world, relays > 0))
                continue
            if relays:
                sender.send(batches[place].frame(step))
            else:
                now_ms = time.monotonic() * 1e3
                steps = range(step * steps_a_frame, (step + 1) * steps_a_frame)
                sender.send(codec.frame([template.fill(group[0], one, now_ms) for one in steps]))
        time.sleep(TICK_S)


if __name__ == "__main__":
    endpoint, world, first, last, hz, *flags = sys.argv[1:]
    numbers = int(world), int(first), int(last), float(hz)
    relays = next((int(flag.removeprefix("--relays=")) for flag in flags if flag.startswith("--relays=")), 0)
    main(endpoint, *numbers, relays=relays, singly="--singly" in flags)
