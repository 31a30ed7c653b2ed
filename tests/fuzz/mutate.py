"""Mutations of msgpack values. A mutation keeps most of the structure, so that errors are not all at the top level."""

import copy
import struct
from collections.abc import Iterator
from random import Random

import msgpack
import msgspec

from tests.fuzz.values import HOSTILE, KINDS, message

DEEPEST = 2000  # maximum depth of nested arrays; a greater depth only makes frames longer


class Pairs(list[object]):
    """A map as a flat list of alternating keys and values. Unlike a dict, the list may contain a key twice."""


class Packed(bytes):
    """Bytes that are already packed; they may be invalid."""


def unpack(data: bytes) -> object:
    """Decode a msgpack value to a tree. Raises ValueError if the data are not msgpack."""

    def pairs(items: list[tuple[object, object]]) -> Pairs:
        return Pairs(one for item in items for one in item)

    try:
        return msgpack.unpackb(data, object_pairs_hook=pairs, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise ValueError(str(error)) from None


def pack(tree: object) -> bytes:
    """Encode a tree as msgpack."""
    if isinstance(tree, Packed):
        return bytes(tree)
    if isinstance(tree, Pairs):
        return _head(0x80, 0xDE, len(tree) // 2) + b"".join(map(pack, tree[: len(tree) // 2 * 2]))
    if isinstance(tree, list | tuple):
        return _head(0x90, 0xDC, len(tree)) + b"".join(map(pack, tree))
    packed: bytes = msgpack.packb(tree)
    return packed


def _head(short: int, long: int, count: int) -> bytes:
    if count < 16:
        return bytes([short | count])
    return struct.pack(">BH", long, count) if count < 1 << 16 else struct.pack(">BI", long + 1, count)


def mutated(data: bytes, random: Random) -> bytes:
    """`data` after one to four random mutations of its decoded tree and, sometimes, of the packed bytes too. If `data`
    cannot be decoded, only its bytes are mutated."""
    try:
        tree = [unpack(data)]
    except ValueError:
        return scrambled(data, random)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        places = list(_places(tree))
        holder, place = random.choice(places)
        random.choice(MUTATIONS)(holder, place, random)
        if not tree:
            return b""
    try:
        packed = pack(tree[0])
    except (ValueError, OverflowError, TypeError, RecursionError):  # such as an integer of more than 64 bits
        return scrambled(data, random)
    return scrambled(packed, random) if random.random() < 0.05 else packed


def _places(tree: list[object]) -> Iterator[tuple[list[object], int]]:
    stack = [tree]
    while stack:
        holder = stack.pop()
        for place, one in enumerate(holder):
            yield holder, place
            if isinstance(one, list):
                stack.append(one)


def _hostile(holder: list[object], place: int, random: Random) -> None:
    holder[place] = hostile(random)


def hostile(random: Random) -> object:
    return copy.deepcopy(random.choice(HOSTILE))


def _nearby(holder: list[object], place: int, random: Random) -> None:
    one = holder[place]
    if isinstance(one, bool) or not isinstance(one, int | float):
        _hostile(holder, place, random)
    else:
        holder[place] = random.choice((one + 1, one - 1, -one, one * 2, float(one), one * 1e6))


def _twice(holder: list[object], place: int, random: Random) -> None:
    if isinstance(holder, Pairs):  # repeat a key with another value
        place -= place % 2
        holder[place:place] = [holder[place], hostile(random)]
    else:
        one = holder[place]
        holder[place:place] = [one] * (1 if isinstance(one, list) else random.choice((1, 3, 70)))


def _dropped(holder: list[object], place: int, _: Random) -> None:
    del holder[place]


def _swapped(holder: list[object], place: int, random: Random) -> None:
    other = random.randrange(len(holder))
    holder[place], holder[other] = holder[other], holder[place]


def _appended(holder: list[object], place: int, random: Random) -> None:
    one = holder[place]
    (one if isinstance(one, list) else holder).append(hostile(random))


def _deep(holder: list[object], place: int, random: Random) -> None:
    depth = random.choice((3, 100, DEEPEST))
    holder[place] = Packed(
        b"\x91" * depth + b"\xc0" if random.random() < 0.5 else b"\x81\xa1a" * depth + b"\xc0"
    )


def _lying(holder: list[object], place: int, random: Random) -> None:
    holder[place] = Packed(random.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6")) + random.randbytes(4))


def _other_message(holder: list[object], place: int, random: Random) -> None:
    holder[place] = Packed(msgspec.msgpack.encode(message(random.choice(KINDS), random)))


MUTATIONS = (
    *(_hostile, _hostile, _hostile, _nearby, _nearby, _twice, _dropped, _swapped, _appended),
    *(_deep, _lying, _other_message),
)


def scrambled(data: bytes, random: Random) -> bytes:
    """`data` after random changes to its bytes: flipped bits, and inserted, deleted and replaced bytes."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        place = random.randrange(len(changed) + 1)
        match random.randrange(4):
            case 0 if place < len(changed):
                changed[place] ^= 1 << random.randrange(8)
            case 1:
                changed[place:place] = random.randbytes(random.choice((1, 4, 16)))
            case 2:
                del changed[place : place + random.choice((1, 4, 64))]
            case _:
                changed[place : place + 1] = bytes([random.choice((0, 0x7F, 0x80, 0xC1, 0xFF))])
    return bytes(changed)
