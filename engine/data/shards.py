"""Token shards on disk, memory-mapped (docs/train/data.md describes the format). Torch-free.

A folder holds index.json and, for each shard n, NNNNN.tokens (token ids, little-endian) and NNNNN.documents (the index
in the shard of each document's first token, as little-endian 64-bit integers). File names are derived from the shard
number; index.json does not contain them.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from agents.rundir.bounded_read import read_ordinary
from engine.config.refusal import RefusedError, shown
from engine.config.sections.bounds import Digest, Line

FORMAT = 1
INDEX = "index.json"
MAX_INDEX_BYTES = 2**26
DTYPES: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}
STARTS = np.dtype("<u8")
CHUNK = 2**24  # bytes read at once to verify a checksum

Count = Annotated[int, Meta(ge=1, le=2**53)]


class Shard(Struct, frozen=True):
    """One shard: its numbers of tokens and documents, and one digest over its two files."""

    tokens: Count
    documents: Count
    digest: Digest


class Index(Struct, frozen=True, kw_only=True):
    """The content of index.json."""

    format: int
    dtype: Literal["uint8", "uint16", "uint32"]
    vocab: Annotated[int, Meta(ge=1, le=2**31)]  # every token id is less than this
    end_of_document: Annotated[int, Meta(ge=0, lt=2**31)]  # the id after the last token of each document
    tokenizer: Line  # `bytes`, or the name and the digest of a tokenizer.json
    shards: Annotated[list[Shard], Meta(min_length=1, max_length=100_000)]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)


class _Format(Struct):
    format: int


class DataError(RefusedError):
    """An error in the training data or in its folder; the message is one sentence."""


def shard_files(folder: Path, number: int) -> tuple[Path, Path]:
    """The two files of a shard: its token ids, and the start positions of its documents."""
    return folder / f"{number:05d}.tokens", folder / f"{number:05d}.documents"


def read_index(folder: Path) -> tuple[Index, str]:
    """The content of the index.json of a folder of token shards, and the digest of this file. Raises DataError."""
    try:
        raw = read_ordinary(folder / INDEX, MAX_INDEX_BYTES)
    except OSError as error:
        raise DataError(
            f"{folder} has no readable {INDEX}: {error.strerror}; legal: a folder written by engine tokenize"
        ) from None
    try:
        if (found := msgspec.json.decode(raw, type=_Format).format) != FORMAT:
            raise DataError(f"{folder} has the format {found} of token shards; legal: {FORMAT}")
        index = msgspec.json.decode(raw, type=Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{folder / INDEX} is not an index of token shards: {error}") from None
    if index.end_of_document >= index.vocab or index.vocab > 2 ** (8 * DTYPES[index.dtype].itemsize):
        raise DataError(
            f"{folder / INDEX} is damaged: vocab = {index.vocab} does not match end_of_document = "
            f"{index.end_of_document} and {index.dtype}"
        )
    return index, f"blake2b-{hashlib.blake2b(raw, digest_size=8).hexdigest()}"


class Source:
    """The tokens of one folder: all its shards, concatenated. Opening a source maps the files into memory but does not
    read them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.index, self.digest = read_index(folder)
        dtype = DTYPES[self.index.dtype]
        self._tokens: list[NDArray[Any]] = []
        self._starts: list[NDArray[Any]] = []
        for number, shard in enumerate(self.index.shards):
            tokens, starts = shard_files(folder, number)
            self._tokens.append(_mapped(tokens, dtype, shard.tokens))
            self._starts.append(_mapped(starts, STARTS, shard.documents))
        self._ends = np.cumsum([shard.tokens for shard in self.index.shards])
        self._documents_before = np.cumsum([0, *(shard.documents for shard in self.index.shards)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(
        self, first: int, count: int, documents: bool = False
    ) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """`count` token ids, beginning with token number `first`, and, if requested, the index of each token's
        document; both [count]. Raises DataError if an id is not in the vocabulary."""
        tokens, numbers = np.empty(count, np.int64), np.empty(count, np.int64) if documents else None
        filled = 0
        shard = int(np.searchsorted(self._ends, first, "right"))
        while filled < count:
            start = first + filled - (int(self._ends[shard - 1]) if shard else 0)
            part = self._tokens[shard][start : start + count - filled]
            tokens[filled : filled + len(part)] = part
            if numbers is not None:
                at = np.arange(start, start + len(part), dtype=np.uint64)
                numbers[filled : filled + len(part)] = (
                    np.searchsorted(self._starts[shard], at, "right") + self._documents_before[shard]
                )
            filled += len(part)
            shard += 1
        if int(tokens.max()) >= self.index.vocab:
            raise DataError(
                f"{self.folder} is damaged: it has the token {int(tokens.max())} near token number {first}, but a "
                f"vocabulary of {self.index.vocab}; engine tokenize --check {self.folder} names the shard"
            )
        return tokens, numbers

    def damage(self) -> str | None:
        """An error message about the first damaged shard, or None if there is none. Reads all files."""
        for number, shard in enumerate(self.index.shards):
            if digest_of(*shard_files(self.folder, number)) != shard.digest:
                return f"{self.folder} is damaged: shard {number} has changed since it was written"
            starts = self._starts[number]
            if int(starts[0]) or (starts[1:] <= starts[:-1]).any() or int(starts[-1]) >= shard.tokens:
                return f"{self.folder} is damaged: the documents of shard {number} do not follow one another"
            if int(self._tokens[number].max()) >= self.index.vocab:
                return f"{self.folder} is damaged: shard {number} has a token outside the vocabulary"
        return None


def digest_of(*files: Path) -> str:
    """Digest of the concatenated content of files."""
    total = hashlib.blake2b(digest_size=8)
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                total.update(chunk)
    return f"blake2b-{total.hexdigest()}"


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    if not path.is_file():
        raise DataError(f"{path} is missing or not a file; legal: the files that engine tokenize wrote")
    try:
        size = path.stat().st_size
        mapped: NDArray[Any] = np.memmap(path, dtype, "r") if size == count * dtype.itemsize else np.empty(0)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be mapped: {shown(str(error))}") from None
    if not len(mapped):
        raise DataError(f"{path} has {size} of {count * dtype.itemsize} bytes; legal: the complete file")
    return mapped
