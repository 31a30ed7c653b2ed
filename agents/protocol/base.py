"""Limits, field types and base class of all messages."""

from typing import Annotated, Final

from msgspec import Meta, Struct

VERSION: Final = 1
MAX_FRAME_BYTES: Final = 1 << 20  # maximum size of a frame that a socket accepts
FRAME_BYTES: Final = 1 << 18  # maximum size of a frame that this release sends
MESSAGE_BYTES: Final = FRAME_BYTES - 512  # maximum size of a message, without its frame

Value = None | bool | int | float | Annotated[str, Meta(max_length=256)]
"""The value of a knob."""

Name = Annotated[str, Meta(min_length=1, max_length=64)]
TEXT: Final = 4096
Text = Annotated[str, Meta(max_length=TEXT)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Rank = Annotated[int, Meta(ge=0, le=2**24)]
Revision = Count
Changes = Annotated[dict[Name, Value], Meta(max_length=64)]
Facts = Annotated[dict[Name, Value], Meta(max_length=256)]
Coords = Annotated[dict[Name, int], Meta(max_length=16)]
Real = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""A finite number."""
FiniteValue = None | bool | int | Real | Annotated[str, Meta(max_length=256)]
Phases = Annotated[dict[Name, Real], Meta(max_length=64)]
Parts = Annotated[dict[Name, Real], Meta(max_length=16)]


class RunError(ValueError):
    """A run, its folder, its sockets or its keys cannot be used. The message is one sentence for the user."""


class WireError(ValueError):
    """A frame is malformed, too large, of another protocol version, or not of this protocol. The message is
    one sentence for the user.
    """


class Message(Struct, array_like=True, tag=str.lower, frozen=True, gc=False):
    """Base class of all messages. Messages contain no reference cycles, so the garbage collector can ignore them."""


class Unknown(Message, frozen=True):
    """Placeholder that `codec` returns for a message of an unknown kind, or for a malformed one (`why`). Never sent."""

    kind: Text = ""
    why: Text = ""


def spell(value: Value) -> str:
    """A knob value in the notation of the command line, such as ``none``, ``true``, ``0.5`` or ``full``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value).removesuffix(".0")
    return str(value)


def clean(text: str) -> str:
    """`text` with control characters, newlines and bidi marks replaced by spaces, because these affect terminals."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def clip(text: str) -> str:
    """`text` shortened to the maximum length of a field of type `Text`."""
    return text if len(text) <= TEXT else f"{text[: TEXT - 1]}…"
