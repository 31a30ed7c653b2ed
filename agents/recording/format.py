"""The format of a recording, which holds a run's updates in `run.db`. The command journal is a separate file.

A recording is divided into segments. A segment begins with a snapshot (the state of the run after a given update),
followed by the updates after the snapshot. So the state of the run can be built from one segment alone, except for the
metric curves of a thinned segment, and old segments can be thinned or deleted one at a time. If updates are missing
between two rows, a new segment begins after the gap. A row holds the updates of a few hundred milliseconds, with
timestamps from the hub's clock, packed as in messages and then compressed.

In a thinned segment, the records of ranks and of the expert load (`OF_A_MOMENT`) have been deleted; the run's curve,
events, commands, knobs and hellos are kept. If the segment continues the previous one, its snapshot has no curve,
because the earlier segments have it.
"""

import contextlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, get_args

import msgspec
from msgspec import Meta, Struct

from agents.protocol import JOB_RECORDS, RECORDS, Count, Unknown, Update, clip

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS segments (
    id       INTEGER PRIMARY KEY,
    wire     INTEGER NOT NULL,   -- the protocol version of its messages
    epoch    TEXT NOT NULL,      -- the hub process
    seq      INTEGER NOT NULL,   -- the snapshot is the state as of this number; the updates follow it
    time_s   REAL NOT NULL,      -- by the hub's clock
    step     INTEGER,            -- the newest step summarised by then
    follows  INTEGER NOT NULL,   -- 1: it follows the previous segment without a gap
    thinned  INTEGER NOT NULL,   -- 1: without the records of single ranks
    checksum INTEGER,            -- of all columns above; null in rows of an earlier release
    snapshot BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS segments_by_epoch ON segments (epoch);
CREATE TABLE IF NOT EXISTS feed (
    id       INTEGER PRIMARY KEY,
    segment  INTEGER NOT NULL,
    first    INTEGER NOT NULL,   -- first and last sequence number
    last     INTEGER NOT NULL,
    time_s   REAL NOT NULL,      -- of its last update
    step     INTEGER,            -- the newest step summarised by then
    checksum INTEGER,            -- of the columns from `segment` on; null in rows of an earlier release
    data     BLOB NOT NULL       -- zlib of a msgpack list of [time_s, first, [update, ...]]
);
CREATE INDEX IF NOT EXISTS feed_by_segment ON feed (segment);
"""

SEGMENT_COLUMNS: Final = "id, wire, epoch, seq, time_s, step, follows, thinned"
ROW_COLUMNS: Final = "segment, first, last, time_s, step"  # columns of `feed`

OF_A_MOMENT: Final = (*RECORDS, *JOB_RECORDS, Unknown)
"""Records of one rank at one step, superseded by the next; they take most of the space of a recording."""

MAX_ROW_BYTES: Final = 256 << 20  # maximum size of a row, uncompressed, in bytes
MAX_UPDATES: Final = 1 << 20  # maximum number of updates in a batch; the largest snapshot has fewer
# Level of zlib. It halves the size and takes 14 ms per megabyte; higher levels gain nothing on these data.
LEVEL: Final = 1

_BULK = frozenset(str(kind.__struct_config__.tag) for kind in OF_A_MOMENT)
_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Update))


# Seconds since the epoch, in the range that the C library can convert to dates.
Seconds = Annotated[float, Meta(ge=0.0, le=1e11)]


class RecordingError(ValueError):
    """The recording, or the position in it, does not exist or cannot be read. The message is one sentence."""


class NothingRecordedError(RecordingError):
    """There is no recording."""


class Batch(Struct, array_like=True, frozen=True):
    """Updates that the hub published together; `first` is the sequence number of the first one."""

    time_s: Seconds
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


def column_checksum(columns: Iterable[object]) -> int:
    """The checksum of the columns that precede the column `checksum`. The blob has its own checksum, from zlib."""
    return zlib.crc32(_encoder.encode(list(columns)))


def check_columns(columns: Iterable[object], checksum: object) -> None:
    """Raise RecordingError if the checksum of `columns` differs from `checksum`. A row that an earlier release has
    written has no checksum (None) and is accepted.
    """
    if checksum not in (None, column_checksum(columns)):
        raise RecordingError("its columns are damaged")


def pack_row(batches: Iterable[Batch]) -> bytes:
    """Encode batches as a row or a snapshot."""
    return zlib.compress(_encoder.encode(list(batches)), LEVEL)


def unpack_row(data: bytes) -> list[Batch]:
    """Decode a row. Raises RecordingError if the row is damaged or too large."""
    try:
        return _batches.decode(_unzip(data, MAX_ROW_BYTES))
    except (zlib.error, msgspec.DecodeError, RecursionError) as error:
        raise RecordingError(f"a row of the recording cannot be read: {error}") from None


def updates_of(data: bytes, most_bytes: int) -> Iterator[msgspec.Raw]:
    """The updates in `data`, the compressed column of a row of the recording, decoded batch by batch to limit memory
    use. Raises RecordingError if the row is damaged, or has more than `most_bytes` bytes uncompressed.
    """
    try:
        for batch in _unread.decode(_unzip(data, most_bytes)):
            yield from _batch.decode(batch).updates
    except (zlib.error, msgspec.DecodeError, RecursionError) as error:
        raise RecordingError(f"a row of the recording cannot be read: {error}") from None


def _unzip(data: bytes, most_bytes: int) -> bytes:
    unzip = zlib.decompressobj()
    plain = unzip.decompress(data, most_bytes)
    if not unzip.eof:
        raise RecordingError(f"a row of the recording is truncated, or has more than {most_bytes >> 20} MiB")
    return plain


def unpack(packed: msgspec.Raw) -> Update:
    """Decode one update. Returns `Unknown` if this release does not know the kind of the update, because a newer
    release wrote it, or if the update is a malformed record of a rank.

    Raises RecordingError for any other malformed update.
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
                return Unknown(kind, why)  # the hub forwards records of ranks without decoding them
        raise RecordingError(f"an update of the recording cannot be read: {why}") from None


def kind_of(packed: msgspec.Raw | bytes) -> str:
    """The kind of a packed update, read without decoding the rest."""
    return _heads.decode(packed).kind


def checked_kind(packed: msgspec.Raw) -> str:
    """The kind of a packed update read from a recording. Raises RecordingError if the update is damaged."""
    try:
        return kind_of(packed)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordingError(f"an update of the recording cannot be read: {error}") from None


def thin(batches: Iterable[Batch], without: frozenset[str] = frozenset()) -> Iterator[Batch]:
    """Remove per-rank records and the kinds in `without` from the batches; the other updates keep their sequence
    numbers."""
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
    """The columns, except the id, of a new row for the table `feed`, which holds the recorded updates. `batches`: one
    or more consecutive batches of one segment."""
    newest = batches[-1]
    last = newest.first + len(newest.updates) - 1
    columns = segment, batches[0].first, last, float(newest.time_s), step
    return *columns, column_checksum(columns), pack_row(batches)
