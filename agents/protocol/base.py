"""What all messages are made of: limits, the types of their fields, and their base."""

from typing import Annotated, Final

from msgspec import Meta, Struct

VERSION: Final = 1
MAX_FRAME_BYTES: Final = 1 << 20  # what a socket takes at most
FRAME_BYTES: Final = 1 << 18  # what we put into one frame at most
MESSAGE_BYTES: Final = FRAME_BYTES - 512  # one message, with room for what a frame wraps around it

Value = None | bool | int | float | Annotated[str, Meta(max_length=256)]
"""What a knob may hold."""

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
"""A number that is finite: neither NaN nor infinite."""
FiniteValue = None | bool | int | Real | Annotated[str, Meta(max_length=256)]
Phases = Annotated[dict[Name, Real], Meta(max_length=64)]
Parts = Annotated[dict[Name, Real], Meta(max_length=16)]


class RunError(ValueError):
    """A run, its folder, its sockets or its keys cannot be used; the text is one sentence for a person."""


class WireError(ValueError):
    """A frame that is not ours, too large, of another version, or malformed. The text is for a person."""


class Message(Struct, array_like=True, tag=str.lower, frozen=True, gc=False):
    """Base of all messages; trees all, so that the garbage collector need not look for cycles."""


class Unknown(Message, frozen=True):
    """Stands for a message of a kind that this release does not know, or (`why`) for one that is malformed: `codec`
    puts it there, nobody sends it."""

    kind: Text = ""
    why: Text = ""


def spell(value: Value) -> str:
    """A knob value as the command line writes it, and no other value: ``none``, ``true``, ``0.5``, ``full``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)


def clean(text: str) -> str:
    """`text` without what steers a terminal: control characters, line ends, and marks that turn the direction."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def clip(text: str) -> str:
    """As much of `text` as a field of type `Text` takes."""
    return text if len(text) <= TEXT else f"{text[: TEXT - 1]}…"
