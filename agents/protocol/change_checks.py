"""Checks of requested changes that msgspec does not perform: no knob appears twice, and no value is NaN or infinite."""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from agents.protocol import Command, Message, Preview, Propose, Try, WireError, spell

# For each message class, the index of `changes` in the packed message; index 0 is the tag.
CHANGES_INDEX: Final[dict[type[Message], int]] = {
    kind: 1 + kind.__struct_fields__.index("changes") for kind in (Propose, Command, Try, Preview)
}
MOST: Final = 64  # maximum number of messages in a frame that requests a change; clients send one


class _Key:
    """A key of a msgpack map. No two keys compare equal, so a dict built from the map keeps duplicate entries."""


_fields_decoder = msgspec.msgpack.Decoder(list[list[msgspec.Raw]])
_entries_decoder = msgspec.msgpack.Decoder(dict[_Key, msgspec.Raw], dec_hook=lambda _type, _name: _Key())


def check_changes(messages: Sequence[Message], packed: msgspec.Raw) -> None:
    """Raise WireError if one of `messages`, decoded from `packed`, names a knob twice or sets a value that is not
    finite.
    """
    if CHANGES_INDEX.keys().isdisjoint(map(type, messages)):
        return
    if len(messages) > MOST:
        raise WireError(
            f"a frame that requests a change has at most {MOST} messages, but this one has {len(messages)}"
        )
    for message, fields in zip(messages, _fields_decoder.decode(packed), strict=True):
        if isinstance(message, Propose | Command | Try | Preview):
            # msgspec keeps the last of two entries with the same key, so the entries are counted in the packed form.
            if len(_entries_decoder.decode(fields[CHANGES_INDEX[type(message)]])) != len(message.changes):
                raise WireError("a change names a knob twice")
            for name, value in message.changes.items():
                if isinstance(value, float) and not math.isfinite(value):
                    one_line = " ".join(name.split())
                    raise WireError(f"{one_line} = {spell(value)} is not a legal value of a knob")
