"""Frames: messages to bytes and back. `decode` is the only way in, and trusts nothing.

A frame is one msgpack value ``[version, [message, ...]]``. What is sent to many is packed once (`pack`) and framed
for each (`frame`, `updates_frame`).

A message of a kind that this release does not know, from a newer peer, becomes `Unknown` and costs the others in its
frame nothing; with `decode_each` so does one that is malformed, and in `Updates` always. Only then is a frame looked at
message by message. `skim` reads of ranks' records no more than whose they are.
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

QUOTED = 200  # characters of why a frame is none
UNKNOWN = 16_384  # messages looked at one by one in a frame; no honest one has more
RECORD_BYTES = 4 << 10  # of one that is skimmed; ours have some hundred


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
"""What a rank says again and again and is short. As all records do, each begins with its rank."""

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
_UPDATES_AT = 3  # the place of `Updates.updates`, after kind, epoch and number
_encoder = msgspec.msgpack.Encoder()
_NOT_FINITE = re.compile(r"Expected `float` [<>]= -?1e\+300")  # what msgspec says of a `Real` that is none


def encode(messages: Iterable[Message]) -> bytes:
    """One frame. WireError: a message holds what msgpack has no word for."""
    try:
        return _encoder.encode([VERSION, list(messages)])
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise WireError(f"this cannot be sent: {error}") from None


def pack(message: Message) -> bytes:
    """One message on its own, of at most `MESSAGE_BYTES`, for `frame` and `updates_frame`.

    WireError: it is too large, or holds what msgpack has no word for (a number of numpy, say).
    """
    try:
        packed = _encoder.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise WireError(f"a {type(message).__name__} cannot be sent: {error}") from None
    if len(packed) > MESSAGE_BYTES:
        raise WireError(
            f"a {type(message).__name__} of {len(packed)} bytes is over the limit of {MESSAGE_BYTES}"
        )
    return packed


def unreadable(packed: bytes) -> str:
    """Why nobody could read this message, which `pack` made, or nothing: a text over its limit, say."""
    try:
        _message_decoder.decode(packed)
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        return _short(str(error))
    return ""


def frame(packed: Iterable[bytes]) -> bytes:
    """One frame of messages that are packed already: equal to `encode` of them."""
    return _encoder.encode([VERSION, [msgspec.Raw(one) for one in packed]])


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
    """One frame of one `Updates` whose updates are packed already: once, for all clients."""
    updates = [msgspec.Raw(one) for one in packed]
    return _encoder.encode([VERSION, [["updates", epoch, seq, updates, begins, snapshot, time_s, since]]])


def version_refusal(version: int) -> str:
    """What to tell one who speaks another version of this wire."""
    return f"the peer speaks wire version {version}, this side {VERSION}; install the same release on both"


def decode(received: bytes | memoryview) -> list[AnyMessage]:
    """The messages of one frame; `WireError` says in one sentence why there are none."""
    return _decode(received, strictly=True)


def decode_each(received: bytes | memoryview) -> list[AnyMessage]:
    """As `decode`, but a message that is malformed costs only itself: it becomes an `Unknown` that says why."""
    return _decode(received, strictly=False)


class Skimmed(Struct, frozen=True, gc=False):
    """A record as it came; `read` is yet to find whether it is one."""

    kind: type[Small]
    rank: int
    packed: bytes


def skim(received: bytes | memoryview) -> list[Skimmed] | None:
    """The records of a frame that holds nothing but small ones, with only their kind and rank checked; else None."""
    if len(received) > MAX_FRAME_BYTES:
        return None
    try:
        heads = _heads_decoder.decode(received)
        each = _records_decoder.decode(received).records
    except _UNREADABLE:
        return None
    if heads.version != VERSION:
        return None
    records = [
        Skimmed(_SMALL[type(head)], head.rank, bytes(packed))
        for head, packed in zip(heads.records, each, strict=True)
    ]
    if len(received) > RECORD_BYTES and any(len(record.packed) > RECORD_BYTES for record in records):
        return None
    return records


def read(record: Skimmed) -> Small | Unknown:
    """What was skimmed, checked as `decode` would; an `Unknown` that says why, if it is malformed."""
    try:
        return _small_decoder.decode(record.packed)
    except _UNREADABLE as error:
        return _malformed(record.kind.__name__.lower(), error)


def _decode(received: bytes | memoryview, strictly: bool) -> list[AnyMessage]:
    if len(received) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(received)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        head = _frame_decoder.decode(received)
        if head.version != VERSION:
            raise WireError(version_refusal(head.version))
        messages = _messages(head.messages, strictly)
        check_changes(messages, head.messages)
        return messages
    except _UNREADABLE as error:
        raise WireError(f"not a frame of ours: {_short(str(error))}") from None


def _short(why: str) -> str:
    """A word of msgspec's, which may quote what it was sent, as part of a sentence."""
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
    """Every message, those not of `kinds` as `Unknown`, and how many of those. A malformed one raises
    `why`; without it, is `Unknown` too, as it is among updates, of which a hub has not read all."""
    found: list[Any] = []
    unknown = 0
    for one in _each_decoder.decode(raw):
        kind = _kind_decoder.decode(one).kind
        if kind not in kinds:
            unknown += 1
            found.append(Unknown(kind[:64]))
        elif kind == "updates":
            fields = _each_decoder.decode(one)
            if why is None or found or len(fields) <= _UPDATES_AT:  # ours are alone in their frame
                raise why or msgspec.ValidationError("updates come from a hub alone")
            updates, more = _one_by_one(fields[_UPDATES_AT], _OF_UPDATES, None)
            fields[_UPDATES_AT] = msgspec.Raw(_encoder.encode(updates))
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
