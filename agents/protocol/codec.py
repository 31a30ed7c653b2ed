"""Encodes messages into frames and decodes frames, which may come from a faulty or hostile peer.

A frame is one msgpack value ``[version, [message, ...]]``. A message for many receivers is packed only once (`pack`);
the packed message is then put into the frame of each receiver (`frame`, `updates_frame`).

A message of an unknown kind, from a newer peer, becomes `Unknown` and does not affect the other messages of its frame.
`decode_each` also returns `Unknown` for a malformed message. A malformed update inside `Updates` always becomes
`Unknown`. A frame is decoded message by message only if decoding it as a whole fails. `skim` reads only the kind and
the rank of records that ranks send.
"""

import re
from collections.abc import Container, Iterable
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta, Struct

from agents.protocol import (
    MAX_FRAME_BYTES,
    MESSAGE_BYTES,
    TEXT,
    VERSION,
    AnyMessage,
    Message,
    Pulse,
    Rank,
    Step,
    Unknown,
    Update,
    Vitals,
    WireError,
)
from agents.protocol.change_checks import check_changes

QUOTED = 200  # maximum number of characters that an error message quotes from msgspec's error
UNKNOWN = 16_384  # maximum number of messages decoded one by one; real frames have fewer
RECORD_BYTES = 4 << 10  # maximum size of a record that is skimmed; real records have a few hundred bytes


class _Frame(Struct, array_like=True, frozen=True):
    version: int
    messages: msgspec.Raw


class _Kind(Struct, array_like=True, frozen=True):
    kind: str


class _OfStep(Struct, array_like=True, frozen=True, gc=False, tag="step"):
    rank: Rank


class _OfPulse(Struct, array_like=True, frozen=True, gc=False, tag="pulse"):
    rank: Rank


class _OfVitals(Struct, array_like=True, frozen=True, gc=False, tag="vitals"):
    rank: Rank


class _Heads(Struct, array_like=True, frozen=True):
    version: int
    records: list[_OfStep | _OfPulse | _OfVitals]


class _Each(Struct, array_like=True, frozen=True):
    version: int
    records: list[msgspec.Raw]


Small = Step | Pulse | Vitals
"""Small records that a rank sends repeatedly. The first field of each is the rank."""

_SMALL: dict[type[Struct], type[Small]] = {_OfStep: Step, _OfPulse: Pulse, _OfVitals: Vitals}
_heads_decoder = msgspec.msgpack.Decoder(_Heads)
_records_decoder = msgspec.msgpack.Decoder(_Each)
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError)
_small_decoder: msgspec.msgpack.Decoder[Small] = msgspec.msgpack.Decoder(Small)
_frame_decoder = msgspec.msgpack.Decoder(_Frame)
_messages_decoder = msgspec.msgpack.Decoder(list[AnyMessage])
_message_decoder = msgspec.msgpack.Decoder(AnyMessage)
_each_decoder = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=UNKNOWN)])
_kind_decoder = msgspec.msgpack.Decoder(_Kind)
_KINDS = {kind.__struct_config__.tag for kind in get_args(AnyMessage)}
_OF_UPDATES = {kind.__struct_config__.tag for kind in get_args(Update)}
_UPDATES_INDEX = 3  # index of `Updates.updates`, after kind, epoch and seq
_encoder = msgspec.msgpack.Encoder()
# The error of msgspec for a `Real` that is NaN or infinite.
_NOT_FINITE = re.compile(r"Expected `float` [<>]= -?1e\+300")


def encode(messages: Iterable[Message]) -> bytes:
    """Encode one frame. Raises WireError if a message holds a value that msgpack cannot represent."""
    try:
        return _encoder.encode([VERSION, list(messages)])
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise WireError(f"the messages cannot be sent: {error}") from None


def pack(message: Message) -> bytes:
    """Encode one message for `frame` and `updates_frame`; the limit is `MESSAGE_BYTES`.

    Raises WireError if the message is too large, or holds a value that msgpack cannot represent (a numpy number, for
    example).
    """
    try:
        packed = _encoder.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise WireError(f"a {type(message).__name__} cannot be sent: {error}") from None
    if len(packed) > MESSAGE_BYTES:
        raise WireError(
            f"a {type(message).__name__} of {len(packed)} bytes exceeds the limit of {MESSAGE_BYTES}"
        )
    return packed


def unreadable(packed: bytes) -> str:
    """Why a receiver would refuse this packed message (for example, a string is too long); "" if it is valid."""
    try:
        _message_decoder.decode(packed)
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        return _short(str(error))
    return ""


def frame(packed: Iterable[bytes]) -> bytes:
    """One frame of packed messages, equal to what `encode` returns for the same messages."""
    return _encoder.encode([VERSION, [msgspec.Raw(one) for one in packed]])


def frame_of_joined(count: int, packed: bytes) -> bytes:
    """One frame of `count` messages, which decodes like the result of `frame`. `packed` is the concatenation of the
    packed messages.
    """
    return b"\x92" + _encoder.encode(VERSION) + b"\xdd" + count.to_bytes(4, "big") + packed


def updates_frame(
    epoch: str,
    seq: int,
    packed: Iterable[bytes],
    *,
    begins: bool = False,
    snapshot: int = 0,
    time_s: float = 0.0,
    since: int | None = None,
) -> bytes:
    """One frame with one `Updates`. The items of `packed` are already encoded, because the hub encodes each update only
    once for all clients."""
    updates = [msgspec.Raw(one) for one in packed]
    return _encoder.encode([VERSION, [["updates", epoch, seq, updates, begins, snapshot, time_s, since]]])


def version_refusal(version: int) -> str:
    """The error message for a peer with another version of this protocol."""
    return (
        f"the peer has protocol version {version}, this side has {VERSION}; install the same release on both"
    )


def recorded_version_refusal(version: int) -> str:
    """The error message for a recording with another version of this protocol."""
    return (
        f"the recording has protocol version {version}, this release reads {VERSION}; "
        "open it with the release that wrote it"
    )


def decode(received: bytes | memoryview) -> list[AnyMessage]:
    """Decode the messages of one frame. Raises WireError, with a one-sentence message, if the frame is refused."""
    return _decode(received, strictly=True)


def decode_each(received: bytes | memoryview) -> list[AnyMessage]:
    """Like `decode`, but a malformed message becomes an `Unknown` with the reason, and the other messages are kept."""
    return _decode(received, strictly=False)


class Skimmed(Struct):
    """Received records that are not decoded yet, stored in columns because the hub of a large run skims a hundred
    thousand records a second. Only kind and rank have been checked; `read` checks the other fields."""

    kinds: list[type[Small]]
    ranks: list[int]
    packed: list[bytes]

    def __len__(self) -> int:
        return len(self.ranks)

    def extend(self, more: "Skimmed") -> None:
        self.kinds += more.kinds
        self.ranks += more.ranks
        self.packed += more.packed


def skim(received: bytes | memoryview) -> Skimmed | None:
    """The records in a frame of small records, with only their kind and rank checked; None for any other frame."""
    if len(received) > MAX_FRAME_BYTES:
        return None
    try:
        heads = _heads_decoder.decode(received)
        each = _records_decoder.decode(received).records
    except _UNREADABLE:
        return None
    if heads.version != VERSION:
        return None
    packed = list(map(bytes, each))
    if len(received) > RECORD_BYTES and max(map(len, packed), default=0) > RECORD_BYTES:
        return None
    kinds = [_SMALL[type(head)] for head in heads.records]
    return Skimmed(kinds, [head.rank for head in heads.records], packed)


def read(kind: type[Update], packed: bytes) -> Small | Unknown:
    """Decode and check a record that `skim` returned; a malformed record becomes an `Unknown` with the reason."""
    try:
        return _small_decoder.decode(packed)
    except _UNREADABLE as error:
        return _malformed(kind.__name__.lower(), error)


def _decode(received: bytes | memoryview, strictly: bool) -> list[AnyMessage]:
    if len(received) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(received)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    try:
        head = _frame_decoder.decode(received)
        if head.version != VERSION:
            raise WireError(version_refusal(head.version))
        messages = _messages(head.messages, strictly)
        check_changes(messages, head.messages)
        return messages
    except _UNREADABLE as error:
        raise WireError(f"not a frame of this protocol: {_short(str(error))}") from None


def _short(why: str) -> str:
    """msgspec's error message, shortened to one line. The message may be long, because it may quote the frame."""
    why = " ".join(why.split())
    return why if len(why) <= QUOTED else f"{why[:QUOTED]}…"


def _malformed(kind: str, error: Exception) -> Unknown:
    return Unknown(kind, _NOT_FINITE.sub("a number that is not finite", str(error))[:TEXT])


def _messages(raw: msgspec.Raw, strictly: bool) -> list[AnyMessage]:
    try:
        return _messages_decoder.decode(raw)
    except _UNREADABLE as error:
        found, unknown = _one_by_one(raw, _KINDS, error if strictly else None)
        if not unknown:
            raise
        return found


def _one_by_one(raw: msgspec.Raw, kinds: Container[object], why: Exception | None) -> tuple[list[Any], int]:
    """Decode messages one by one. Returns the messages, and how many of them became `Unknown`.

    A message whose kind is not in `kinds` becomes `Unknown`. If a message is malformed, this function raises `why`; if
    `why` is None, the message becomes `Unknown` instead. A malformed message inside an `Updates` always becomes
    `Unknown`, so that a client does not refuse the whole frame because of one record: the hub forwards records after
    checking only their kind and rank (`skim`).
    """
    found: list[Any] = []
    unknown = 0
    for one in _each_decoder.decode(raw):
        kind = _kind_decoder.decode(one).kind
        if kind not in kinds:
            unknown += 1
            found.append(Unknown(kind[:64]))
        elif kind == "updates":
            fields = _each_decoder.decode(one)
            if why is None or found or len(fields) <= _UPDATES_INDEX:  # a hub sends one `Updates` per frame
                raise why or msgspec.ValidationError("only a hub sends updates")
            updates, more = _one_by_one(fields[_UPDATES_INDEX], _OF_UPDATES, None)
            fields[_UPDATES_INDEX] = msgspec.Raw(_encoder.encode(updates))
            found.append(_message_decoder.decode(_encoder.encode(fields)))
            unknown += more
        else:
            try:
                found.append(_message_decoder.decode(one))
            except _UNREADABLE as error:
                if why:
                    raise why from None
                unknown += 1
                found.append(_malformed(kind, error))
    return found, unknown
