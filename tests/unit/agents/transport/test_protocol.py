"""The protocol: decoding returns each message unchanged, another msgpack library can read the frames, and hostile
frames are refused.
"""

import contextlib
import math
from typing import get_args

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from agents import protocol
from agents.protocol import AnyMessage, KnobState, Legal, Message, WireError, codec, spell
from agents.transport.frame_filling import chunks

KINDS = get_args(AnyMessage)


def strategy(kind: inspect.Type) -> st.SearchStrategy[object]:
    """A Hypothesis strategy for the legal values of a msgspec type, in the form that `decode` returns."""
    match kind:
        case inspect.IntType():
            low, high = (
                kind.ge if kind.ge is not None else -(2**63),
                kind.le if kind.le is not None else 2**63 - 1,
            )
            return st.integers(low, high)
        case inspect.FloatType():
            # NaN and infinite values are not legal in a change
            return st.floats(kind.ge, kind.le, allow_nan=False, allow_infinity=False)
        case inspect.StrType():
            return st.text(st.characters(codec="utf-8"), min_size=kind.min_length or 0, max_size=8)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.UnionType():
            return st.one_of([strategy(one) for one in kind.types])
        case inspect.ListType():
            return st.lists(strategy(kind.item_type), max_size=3)
        case inspect.DictType():
            return st.dictionaries(strategy(kind.key_type), strategy(kind.value_type), max_size=3)
        case inspect.StructType():
            return st.builds(kind.cls, **{field.name: strategy(field.type) for field in kind.fields})
    raise AssertionError(f"no strategy for {kind}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_encoding_and_decoding_are_inverse(kind: type[Message]) -> None:
    @settings(max_examples=25, deadline=None)
    @given(strategy(inspect.type_info(kind)))
    def holds(message: Message) -> None:
        frame = codec.encode([message])
        assert codec.decode(frame) == [message]
        assert codec.frame([codec.pack(message)]) == frame

    holds()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_reference_codec_reads_it(kind: type[Message]) -> None:
    @settings(max_examples=10, deadline=None)
    @given(strategy(inspect.type_info(kind)))
    def holds(message: Message) -> None:
        version, (fields,) = msgpack.unpackb(codec.encode([message]))
        assert version == protocol.VERSION
        assert fields == [kind.__name__.lower(), *msgspec.to_builtins(message)[1:]]

    holds()


def test_updates_packed_once_are_the_updates_message() -> None:
    gone = protocol.Gone(3, clean=True)
    frame = codec.updates_frame("e", 9, [codec.pack(gone)], begins=True, snapshot=2, time_s=1.5)
    assert codec.decode(frame) == [protocol.Updates("e", 9, [gone], begins=True, snapshot=2, time_s=1.5)]


@given(st.lists(st.integers(0, protocol.MESSAGE_BYTES), max_size=12))
def test_chunks_keep_order_and_fit_a_frame(sizes: list[int]) -> None:
    packed = [b"\xc0" * size for size in sizes]
    parts = list(chunks(packed))
    assert [one for part in parts for one in part] == packed
    assert all(
        len(codec.updates_frame("e" * 16, 2**53, part, time_s=1.0)) <= protocol.FRAME_BYTES for part in parts
    )


def test_a_newer_peer_may_append_fields() -> None:
    frame = msgpack.packb([protocol.VERSION, [["peers", 1, 5, [], {"new": [1]}]], "more"])
    assert codec.decode(frame) == [protocol.Peers(1, 5, [])]


def test_an_unknown_kind_does_not_affect_other_messages() -> None:
    gone = ["gone", 1, True, "bye"]
    assert codec.decode(msgpack.packb([protocol.VERSION, [["sparkle", {"a": [1]}], gone]])) == [
        protocol.Unknown("sparkle"),
        protocol.Gone(1, clean=True, text="bye"),
    ]


def test_an_unknown_update_keeps_its_number() -> None:
    updates = ["updates", "e", 9, [["gone", 1, True, ""], ["sparkle", 1]], False, 0, 1.5]
    assert codec.decode(msgpack.packb([protocol.VERSION, [updates]])) == [
        protocol.Updates("e", 9, [protocol.Gone(1, clean=True), protocol.Unknown("sparkle")], time_s=1.5)
    ]


DEEP = b"\x91" * 200_000 + b"\xc0"
HOSTILE = {
    "nothing": b"",
    "a text": b"GET / HTTP/1.1\r\n\r\n",
    "lying length": b"\x92\x01\xdd\xff\xff\xff\xff",
    "trailing bytes": b"\x92\x01\x90zzz",
    "deep": DEEP,
    "deep in place of the messages": b"\x92\x01" + DEEP,
    "deep after the messages": b"\x93\x01\x90" + DEEP,
    "deep in a field that a newer peer may append": b"\x92\x01\x91\x95"
    + msgpack.packb(["peers", 1, 5, []])[1:]
    + DEEP,
    "not UTF-8": b"\x92\x01\x91\x94\xa4gone\x00\xc3\xa2\xff\xfe",
    "a kind that is not a text": msgpack.packb([1, [[7, 1]]]),
    "no kind": msgpack.packb([1, [[]]]),
    "an unknown kind and a malformed message": msgpack.packb([1, [["shutdown", 1], ["gone", "one", True]]]),
    "more unknown kinds than the limit": msgpack.packb([1, [["x"]] * (codec.UNKNOWN + 1)]),
    "updates with another message": msgpack.packb([1, [["updates", "e", 1, [["x"]]]] * 2]),
    "more proposals than the limit": msgpack.packb([1, [["propose", "a", {}]] * 65]),
    "updates within updates": msgpack.packb([1, [["updates", "e", 1]]]),
    "wrong type": msgpack.packb([1, [["gone", "one", True]]]),
    "number too large": msgpack.packb([1, [["gone", 2**64 - 1, True]]]),
    "negative": msgpack.packb([1, [["gone", -1, True]]]),
    "unhashable key": msgpack.packb([1, [["propose", "a", {(1, 2): 1}, None, None, ""]]]),
    "extension type": b"\x92\x01\x91\xc7\x04\x01abcd",
    "too many knobs": msgpack.packb([1, [["propose", "a", {str(n): n for n in range(65)}]]]),
    "a text that is too long": msgpack.packb([1, [["gone", 1, True, "x" * 5000]]]),
    "too large": b"\x00" * (protocol.MAX_FRAME_BYTES + 1),
}


@pytest.mark.parametrize("frame", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_frames_are_one_sentence(frame: bytes) -> None:
    with pytest.raises(WireError) as refusal:
        codec.decode(frame)
    assert "\n" not in str(refusal.value)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(frame: bytes) -> None:
    with contextlib.suppress(WireError):
        codec.decode(frame)


def test_another_version_is_refused_with_advice() -> None:
    with pytest.raises(WireError, match="protocol version 7, this side has 1; install the same release"):
        codec.decode(msgpack.packb([7, "whatever the error text is"]))


def test_a_message_too_large_for_a_frame_is_not_packed() -> None:
    layer = protocol.LayerLoad(0, [2**40] * 4096, 0)
    with pytest.raises(WireError, match="exceeds the limit"):
        codec.pack(protocol.Experts(1, [layer] * 8))


@pytest.mark.parametrize(
    ("legal", "value", "admitted"),
    [
        (Legal([1, 2, 4]), 2, True),
        (Legal([1, 2, 4]), 3, False),
        (Legal([1, 2, 4]), 2.0, False),
        (Legal([1]), True, False),
        (Legal([True, False]), 1, False),
        (Legal(low=0.5, high=4.0), 1, True),
        (Legal(low=0.5, high=4.0), True, False),
        (Legal(low=0.5, high=4.0), math.nan, False),
        (Legal(low=0.5, high=4.0), math.inf, False),
        (Legal(low=0.5, high=4.0), "1", False),
        (Legal([1]), None, False),
        (Legal([1], optional=True), None, True),
    ],
)
def test_legal_values(legal: Legal, value: protocol.Value, admitted: bool) -> None:
    assert legal.admits(value) is admitted


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1.0000001, "1.0000001"),
        (1 - 1e-12, "0.999999999999"),
        (1.0, "1"),
        (2.0**53, "9007199254740992"),
        (3e-4, "0.0003"),
        (1e-08, "1e-08"),
    ],
)
def test_different_numbers_have_different_spellings(value: float, said: str) -> None:
    assert spell(value) == said and float(said) == value
    refused = KnobState("lr", 0.5, Legal(low=2.0, high=2.0000001), True).refusal(value)
    assert refused == f"lr = {said} is not legal; legal: 2 to 2.0000001"
