"""Generates messages from their types: valid messages, and messages that no correct peer sends."""

import math
from random import Random
from typing import Final, get_args

import msgpack
import msgspec
from msgspec import inspect

from agents.protocol import VERSION, AnyMessage, Message

KINDS: Final[tuple[type[Message], ...]] = get_args(AnyMessage)
RUN, WORLD, EPOCH = "r", 4, "the-epoch"
KNOBS: Final = ("micro_batches", "recompute", "capacity_factor", "save")

# Typical values by field name, so that messages pass the first checks.
PLAUSIBLE: Final[dict[str, tuple[object, ...]]] = {
    "run": (RUN,),
    "version": (VERSION,),
    "world": (WORLD,),
    "rank": tuple(range(WORLD)),
    "peer": tuple(range(WORLD)),
    "epoch": (EPOCH, ""),
    "layout": ("the-layout",),
    "id": tuple(f"id-{number}" for number in range(200)),
    "revision": tuple(range(12)),
    "base_revision": (None, 0, 1),
    "expires_step": (None, 5, 500),
    "step": tuple(range(40)),
    "steps": (4, 8),
    "seq": (0, 1, 5),
    "since": (None, 0, 1),
    "digest": ("d",),
    "frames": (1, 8, 64),
    "snapshot": (0, 0, 1, 2),
    "hz": (0.0, 1.0, 10.0),
    "frame_bytes": (0, 4096),
    "name": KNOBS,
    "state": ("applied", "accepted"),
    "changes": ({"micro_batches": 2}, {"micro_batches": 8, "recompute": "full"}, {"save": True}),
    "loss": (2.5, math.nan, math.inf),
}

HOSTILE: Final[tuple[object, ...]] = (
    *(None, True, False, 0, -1, 1, 2**24, 2**24 + 1, 2**40 + 1, 2**53, 2**53 + 1, 2**63, 2**64 - 1, -(2**63)),
    *(math.nan, math.inf, -math.inf, 1e308, 5e-324, -0.0, 0.5),
    *("", "x", "x" * 64, "x" * 65, "x" * 257, "x" * 4097, "\0", "\x1b]0;pwned\x07", "\u202e", "\n", "none"),
    *(b"", b"\xff\xfe", msgpack.ExtType(4, b"abcd"), msgpack.Timestamp(2**33, 5)),
    *([], {}, [[]], [0] * 40, {"a": {}}, {str(n): n for n in range(70)}, {1: 2}, {"": ""}, {"x" * 65: 0.0}),
)


def sample(kind: inspect.Type, random: Random, name: str = "") -> object:
    """A random value of a msgspec type within its limits. Usually it is a typical value for the field `name`."""
    if name in PLAUSIBLE and random.random() < 0.9:
        return random.choice(PLAUSIBLE[name])
    match kind:
        case inspect.IntType():
            low, high = (
                (-(2**63) if kind.ge is None else kind.ge),
                (2**63 - 1 if kind.le is None else kind.le),
            )
            return random.choice(
                (low, high, random.randint(low, high), max(low, min(high, random.randint(0, 50))))
            )
        case inspect.FloatType():
            low, high = (-1e3 if kind.ge is None else kind.ge), (1e3 if kind.le is None else kind.le)
            return random.uniform(low, high)
        case inspect.StrType():
            length = random.randint(kind.min_length or 0, min(kind.max_length or 12, 12))
            return "".join(random.choice("abcé€😀\x1b ") for _ in range(length)) or "x" * (
                kind.min_length or 0
            )
        case inspect.BoolType():
            return random.random() < 0.5
        case inspect.NoneType():
            return None
        case inspect.LiteralType():
            return random.choice(kind.values)
        case inspect.UnionType():
            return sample(random.choice(kind.types), random, name)
        case inspect.ListType():
            return [sample(kind.item_type, random, name) for _ in range(random.randint(0, 4))]
        case inspect.DictType():
            sizes = range(random.randint(0, 4))
            return {sample(kind.key_type, random): sample(kind.value_type, random) for _ in sizes}
        case inspect.StructType():
            fields = {field.name: sample(field.type, random, field.name) for field in kind.fields}
            return kind.cls(**fields)
    raise AssertionError(f"no sample for {kind}")


_TYPES: Final = {kind: inspect.type_info(kind) for kind in KINDS}


def message(kind: type[Message], random: Random) -> Message:
    """One well-formed message."""
    made = sample(_TYPES[kind], random)
    assert isinstance(made, Message)
    return made


def frame(kinds: list[type[Message]], random: Random) -> bytes:
    """One frame of well-formed messages."""
    return msgspec.msgpack.encode([VERSION, [message(kind, random) for kind in kinds]])
