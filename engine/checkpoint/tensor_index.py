"""Index of a checkpoint's tensors: the file and offset of each part of each tensor. Torch-free.

The index is JSON with a fixed schema. The index may be malicious, so it is checked before tensors are read or memory is
allocated. The files of the ranks contain only tensor data, little-endian and in C order.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from agents.rundir.bounded_read import read_ordinary
from engine.config.refusal import RefusedError

INDEX = "tensors.json"
MAX_INDEX_BYTES = 2**30  # about ten million parts
ITEM_BYTES = {  # name of the dtype in torch -> bytes per element
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
FileName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z")]
Natural = Annotated[int, Meta(ge=0, le=2**53)]
Shape = Annotated[tuple[Natural, ...], Meta(max_length=8)]


class Chunk(Struct, frozen=True, forbid_unknown_fields=True):
    """A rectangular part of a tensor, stored in `file` at byte offset `at`."""

    offsets: Shape
    sizes: Shape
    file: FileName
    at: Natural


class Stored(Struct, frozen=True, forbid_unknown_fields=True):
    """A saved tensor: its dtype, its shape and the chunks that the ranks have written."""

    dtype: str
    shape: Shape
    chunks: list[Chunk]


Index = dict[str, Stored]


def read_index(folder: Path, files: Mapping[str, int]) -> Index:
    """The index of the checkpoint in `folder`; raises RefusedError if the index is inconsistent or does not match the
    file sizes in `files`."""
    try:
        raw = read_ordinary(folder / INDEX, MAX_INDEX_BYTES, links=False)
        index = msgspec.json.decode(raw, type=Index)
    except OSError as error:
        raise RefusedError(f"{folder} is not a complete checkpoint: {INDEX}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"{folder} is damaged: {INDEX} cannot be read: {error}") from None
    for name, stored in index.items():
        if why := _refusal(stored, files):
            raise RefusedError(f"{folder} is damaged: in {INDEX}, {name[:200]!r} {why}")
    return index


def write_index(index: Index) -> bytes:
    return msgspec.json.encode(index)


def _refusal(stored: Stored, files: Mapping[str, int]) -> str | None:
    """The reason why a tensor's entry is invalid, or None."""
    item_bytes = ITEM_BYTES.get(stored.dtype)
    if item_bytes is None:
        return f"has an unknown dtype; legal: {', '.join(ITEM_BYTES)}"
    for chunk in stored.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(stored.shape):
            return "has a chunk with a different number of dimensions"
        ends = (offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if any(end > whole for end, whole in zip(ends, stored.shape, strict=True)):
            return "has a chunk that reaches beyond its shape"
        if chunk.at + math.prod(chunk.sizes) * item_bytes > files.get(chunk.file, 0):
            return f"has a chunk that reaches beyond the end of {chunk.file}"
    if len({chunk.offsets for chunk in stored.chunks}) < len(stored.chunks):
        return "has two chunks at the same offsets"
    if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.shape):
        return "has chunks that do not add up to its shape"
    return None
