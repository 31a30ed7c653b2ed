"""What a recording is: the feed of a run's updates in `run.db`, beside the command journal.

It is cut into segments. Each begins with a snapshot (the state of the run as of a sequence number) and goes on with
the updates after it; so a segment can be read without those before it, a gap is simply the beginning of the next,
and what is old can be thinned or forgotten a segment at a time. Updates lie in rows of some hundred milliseconds:
packed as they crossed the wire, with the hub's time, and compressed.

A thinned segment has no more what single ranks said from step to step (`OF_A_MOMENT`); the run's curve, its events
and commands, its knobs, and who was there are kept.
"""

import contextlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, get_args

import msgspec
from msgspec import Meta, Struct

from agents.protocol import Count, Experts, Loads, Peers, Pulse, Step, Timeline, Unknown, Update, Vitals, clip

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS segments (
    id       INTEGER PRIMARY KEY,
    wire     INTEGER NOT NULL,   -- the wire version of what is in it
    epoch    TEXT NOT NULL,      -- the hub start
    seq      INTEGER NOT NULL,   -- the snapshot is the state as of this number; the updates follow it
    time_s   REAL NOT NULL,      -- of the hub's clock
    step     INTEGER,            -- the newest step summarised by then
    follows  INTEGER NOT NULL,   -- 1: on the segment before, with nothing missing between
    thinned  INTEGER NOT NULL,   -- 1: without what single ranks said from step to step
    snapshot BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS feed (
    id       INTEGER PRIMARY KEY,
    segment  INTEGER NOT NULL,
    first    INTEGER NOT NULL,   -- the numbers it covers
    last     INTEGER NOT NULL,
    time_s   REAL NOT NULL,      -- of its last
    step     INTEGER,            -- the newest step summarised by then
    data     BLOB NOT NULL       -- zlib of a msgpack list of [time_s, first, [update, ...]]
);
CREATE INDEX IF NOT EXISTS feed_by_segment ON feed (segment);
"""

OF_A_MOMENT: Final = (Step, Loads, Experts, Timeline, Peers, Pulse, Vitals, Unknown)
"""The bulk of a feed: what one rank did or looked like at one step, which the next one supersedes."""

MAX_ROW_BYTES: Final = 256 << 20  # uncompressed
MAX_UPDATES: Final = 1 << 20  # of a batch: the largest snapshot has fewer
LEVEL: Final = 1  # of zlib: half as large for 14 ms a megabyte; higher ones gain nothing on times

_BULK = frozenset(str(kind.__struct_config__.tag) for kind in OF_A_MOMENT)
_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Update))


class RecordingError(ValueError):
    """There is no such recording, no such place in it, or it cannot be read; one sentence for a person."""


class NothingRecordedError(RecordingError):
    """There is no recording at all."""


class Batch(Struct, array_like=True, frozen=True):
    """Updates that the hub published together, numbered from `first`."""

    time_s: float
    first: Count
    updates: Annotated[list[msgspec.Raw], Meta(max_length=MAX_UPDATES)]


class _Head(Struct, array_like=True, frozen=True):
    kind: str


_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(list[Batch])
_batch = msgspec.msgpack.Decoder(Batch)
_unread = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=MAX_UPDATES)])
_heads = msgspec.msgpack.Decoder(_Head)
_updates: msgspec.msgpack.Decoder[Update] = msgspec.msgpack.Decoder(Update)


def pack_row(batches: Iterable[Batch]) -> bytes:
    """Batches as a row, or a snapshot, holds them."""
    return zlib.compress(_encoder.encode(list(batches)), LEVEL)


def unpack_row(data: bytes) -> list[Batch]:
    """RecordingError: this is no row of ours, or an absurdly large one."""
    try:
        return _batches.decode(_unzip(data, MAX_ROW_BYTES))
    except (zlib.error, msgspec.DecodeError, RecursionError) as error:
        raise RecordingError(f"a row of the recording cannot be read: {error}") from None


def updates_of(data: bytes, most_bytes: int) -> Iterator[msgspec.Raw]:
    """The updates of a row of at most so many bytes uncompressed, read a batch at a time, so that not all that a row
    pretends to hold is in memory at once. RecordingError: this is no row of ours, or a larger one."""
    try:
        for batch in _unread.decode(_unzip(data, most_bytes)):
            yield from _batch.decode(batch).updates
    except (zlib.error, msgspec.DecodeError, RecursionError) as error:
        raise RecordingError(f"a row of the recording cannot be read: {error}") from None


def _unzip(data: bytes, most_bytes: int) -> bytes:
    unzip = zlib.decompressobj()
    plain = unzip.decompress(data, most_bytes)
    if not unzip.eof:
        raise RecordingError(f"a row of the recording is cut off, or has more than {most_bytes >> 20} MiB")
    return plain


def unpack(packed: msgspec.Raw) -> Update:
    """One update; `Unknown` for a kind of a newer release, and for a record that a rank sent malformed.

    RecordingError: another is malformed.
    """
    try:
        return _updates.decode(packed)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        why = clip(str(error))
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            kind = kind_of(packed)
            if kind not in _KINDS:
                return Unknown(clip(kind))
            if kind in _BULK:
                return Unknown(kind, why)  # a hub passes on what ranks sent before it has read it
        raise RecordingError(f"an update of the recording cannot be read: {why}") from None


def kind_of(packed: msgspec.Raw | bytes) -> str:
    """The kind of a packed update, without a look at the rest of it."""
    return _heads.decode(packed).kind


def thin(batches: Iterable[Batch], without: frozenset[str] = frozenset()) -> Iterator[Batch]:
    """The same without the bulk (and the kinds `without`), every update under its own number."""
    dropped = _BULK | without
    for batch in batches:
        run: list[msgspec.Raw] = []
        for place, packed in enumerate(batch.updates):
            if kind_of(packed) not in dropped:
                run.append(packed)
            elif run:
                yield Batch(batch.time_s, batch.first + place - len(run), run)
                run = []
        if run:
            yield Batch(batch.time_s, batch.first + len(batch.updates) - len(run), run)


def row_of(segment: int, batches: list[Batch], step: int | None) -> tuple[Any, ...]:
    """The columns of `feed` but its id; `batches` are of one segment, in order, and not none."""
    newest = batches[-1]
    last = newest.first + len(newest.updates) - 1
    return segment, batches[0].first, last, newest.time_s, step, pack_row(batches)
