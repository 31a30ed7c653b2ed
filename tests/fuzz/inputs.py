"""Inputs for the fuzz targets: valid seeds and their mutations."""

import sqlite3
import tempfile
from pathlib import Path
from random import Random
from typing import Final

import msgpack
import msgspec
from msgspec import structs

from agents.protocol import VERSION, Board, Credit, Hello, Message, Propose, Updates, codec
from agents.recording import format
from agents.recording.commands import SCHEMA
from agents.rundir import runs
from agents.rundir.hub_file import HubFile
from agents.transport.addresses import Endpoints
from agents.transport.curve_keys import KeyStore
from agents.transport.roles import Role
from tests.fuzz import mutate
from tests.fuzz.values import KINDS, WORLD, frame, message
from tests.unit.agents.fleet import make_board, make_hello, make_summary

STEPPED: Final = ("hub", "client", "link", "relay")  # an input is a list of steps
LONGEST: Final = 1 << 16
PLAIN: Final = {
    "id": "a",
    "state": "applied",
    "changes": '{"lr": 1}',
    "before": "{}",
    "who": "me",
    "why": "",
    "reason": "",
}


def spoken(kind: type[Message], who: int, random: Random) -> bytes:
    """A frame with one random message of the type `kind`. If the message has a field `rank`, the field usually contains
    the sender's rank."""
    made = message(kind, random)
    if random.random() < 0.7:  # values with which the run continues, so that later steps reach more code
        if kind is Hello:
            made = make_hello(who % WORLD, WORLD, revision=random.choice((0, 0, 1, 5)))
        elif kind is Board:
            board = make_board()
            made = Board(0, random.choice((0, 1, 2)), board.digest(), board.states())
    if "rank" in kind.__struct_fields__ and random.random() < 0.9:
        made = structs.replace(made, rank=who)
    return codec.encode([made])


def step(kind: type[Message], random: Random) -> list[object]:
    who = random.randrange(6)
    what = random.choice((0, 0, 0, 1, 1, 2))
    return [what, who, spoken(kind, who, random)]


def seeds(target: str) -> list[bytes]:
    """Valid inputs, with every kind of message if the target takes messages."""
    random = Random(target)
    if target == "decode":
        single = [frame([kind], random) for kind in KINDS for _ in range(2)]
        return [*single, *(frame(random.sample(KINDS, 5), random) for _ in range(10))]
    if target == "files":
        return _files()
    stepped = [msgpack.packb([step(kind, random)]) for kind in KINDS for _ in range(3)]
    several = [[step(random.choice(KINDS), random) for _ in range(6)] for _ in range(20)]
    for steps in several:  # add a step in which time passes
        steps.insert(3, [3, random.randrange(6), b""])
    if target == "client":
        stepped += [msgpack.packb([step(Updates, random) for _ in range(3)]) for _ in range(20)]
    if target == "hub":
        asks = [
            [1, 0, codec.encode([Credit(VERSION, "the-epoch", 0, 8)])],
            [1, 0, spoken(Propose, 0, random)],
        ]
        stepped += [msgpack.packb([*asks, [3, 1, b""], [0, 0, spoken(Hello, 0, random)]])]
    return [*stepped, *map(msgpack.packb, several)]


def _files() -> list[bytes]:
    hub = HubFile("r", "e", Endpoints("ipc:///tmp/r", "ipc:///tmp/c"), 1, VERSION, 1.0)
    tcp = Endpoints("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", keys="/tmp/keys", hub="x" * 40)
    told = "2026-01-02 03:04:05 rank 2 (dp2) was killed by SIGKILL at step 5\n\nrank 0 had ended without an error\n"
    with tempfile.TemporaryDirectory() as folder:
        store = KeyStore(Path(folder) / "keys")
        key = store.make("mine", Role.VIEWER).read_bytes()
        listed = (store.folder / "allowed.json").read_bytes()
        path = Path(folder) / runs.RECORD_FILE
        db = sqlite3.connect(path)
        db.execute(SCHEMA)
        names = [found[1] for found in db.execute("PRAGMA table_info(commands)")]
        db.commit()
        db.close()
        journal = path.read_bytes()
    row = [PLAIN.get(name, 1) for name in names]
    said = [msgspec.Raw(codec.pack(one)) for one in (make_hello(0, WORLD), make_summary(1), make_summary(2))]
    packed = format.pack_row([format.Batch(1.0, 1, said)])
    segment = [1, VERSION, "e", 0, 1.0, None, 0, 0, packed]
    feed = [1, 1, 1, 3, 1.0, 2, packed]
    accepted = [{**PLAIN, "state": "accepted", "id": "b"}.get(name, 1) for name in names]
    return [
        b"w" + bytes(msgpack.packb([segment, feed, [2, *segment[1:]], [2, 2, *feed[2:]]])),
        *(b"h" + msgspec.json.encode(one) for one in (hub, structs.replace(hub, tcp=tcp, host="elsewhere"))),
        *(b"f" + told.encode(), b"k" + key, b"l" + listed, b"j" + journal),
        b"r" + bytes(msgpack.packb([row, accepted])),
    ]


def changed(target: str, data: bytes, random: Random) -> bytes:
    """`data` after a random mutation. The kinds of mutation depend on the fuzz target."""
    if target in STEPPED:
        made = _changed_steps(data, random)
    elif target == "files":
        made = _changed_file(data, random)
    else:
        made = mutate.mutated(data, random)
    return made[:LONGEST]


def _changed_steps(data: bytes, random: Random) -> bytes:
    try:
        steps = msgpack.unpackb(data)
        if not isinstance(steps, list):
            return mutate.mutated(data, random)
    except (ValueError, msgpack.UnpackException):
        return mutate.mutated(data, random)
    place = random.randrange(len(steps) + 1)
    match random.randrange(8):
        case 0:
            steps.insert(place, step(random.choice(KINDS), random))
        case 1:
            steps.insert(place, [3, random.choice((0, 1, 1, 2, 2, 3, 4, 5)), b""])
        case 2 if place < len(steps):
            del steps[place]
        case 3 if place < len(steps):
            steps.insert(random.randrange(len(steps)), steps[place])
        case 4 if place < len(steps) and isinstance(steps[place], list) and len(steps[place]) == 3:
            steps[place][random.randrange(2)] = random.randrange(6)
        case _ if place < len(steps) and isinstance(steps[place], list) and len(steps[place]) == 3:
            if isinstance(steps[place][2], bytes):
                steps[place][2] = mutate.mutated(steps[place][2], random)
        case _:
            return mutate.mutated(data, random)
    return bytes(msgpack.packb(steps[-40:]))


def _changed_file(data: bytes, random: Random) -> bytes:
    kind, content = data[:1], data[1:]
    if kind in (b"h", b"k", b"l") and random.random() < 0.7:
        try:
            tree = mutate.mutated(msgpack.packb(msgspec.json.decode(content)), random)
            return kind + msgspec.json.encode(msgpack.unpackb(tree, strict_map_key=False))
        except (ValueError, TypeError, OverflowError, msgspec.MsgspecError, msgpack.UnpackException):
            pass
    if kind in (b"r", b"w"):
        return kind + mutate.mutated(content, random)
    return kind + mutate.scrambled(content, random)
