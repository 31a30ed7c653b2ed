"""What a frame asks to be changed, where msgspec is too lenient: it keeps the last of a name given twice, and lets
NaN pass. Neither is a clear wish."""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from agents.protocol import Command, Message, Preview, Propose, Try, WireError, spell

# By kind, the place of what is asked in the packed message, whose first field is the kind itself.
ASKS: Final[dict[type[Message], int]] = {
    kind: 1 + kind.__struct_fields__.index("changes") for kind in (Propose, Command, Try, Preview)
}
MOST: Final = 64  # messages in a frame that asks for something; ours have one
_fields_decoder = msgspec.msgpack.Decoder(list[list[msgspec.Raw]])


def check_asks(messages: Sequence[Message], packed: msgspec.Raw) -> None:
    """WireError, if one of `messages`, which were decoded from `packed`, asks for what no operator can mean."""
    if ASKS.keys().isdisjoint(map(type, messages)):
        return
    if len(messages) > MOST:
        raise WireError(
            f"a frame that asks for a change has at most {MOST} messages, and this has {len(messages)}"
        )
    for message, fields in zip(messages, _fields_decoder.decode(packed), strict=True):
        if isinstance(message, Propose | Command | Try | Preview):
            if _entries(bytes(fields[ASKS[type(message)]])) != len(message.changes):
                raise WireError("not a frame of ours: a knob is named twice in one change")
            for name, value in message.changes.items():
                if isinstance(value, float) and not math.isfinite(value):
                    named = " ".join(name.split())
                    raise WireError(f"{named} = {spell(value)} is no value that a knob can have")


def _entries(packed: bytes) -> int:
    """How many entries a packed map has, by its own word."""
    first = packed[0]
    if first >> 4 == 0x8:
        return first & 0xF
    return int.from_bytes(packed[1:3] if first == 0xDE else packed[1:5])
