"""Writes token shards document by document, in bounded memory. Torch-free.

The files are written to the folder `OUT.partial`; the index is written last. Then the folder is renamed to `OUT`, the
name that the user gave. So if `OUT` exists, it is complete.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from engine.data.shards import DTYPES, FORMAT, INDEX, STARTS, DataError, Index, Shard, digest_of, shard_files

PARTIAL = ".partial"
BUFFERED = 2**20  # tokens in memory before they are written


def smallest_dtype(vocab: int) -> str:
    return next(name for name, dtype in DTYPES.items() if vocab <= 2 ** (8 * dtype.itemsize))


class ShardWriter:
    """Writes token shards to the folder `out`. Use the writer as a context manager, which completes the folder at the
    end or, after an error, removes the folder.

    A document is never split across two shards, so a shard may exceed `shard_tokens` by one document. Raises DataError
    if the folder exists or cannot be written.
    """

    def __init__(self, out: Path, vocab: int, end_of_document: int, tokenizer: str, shard_tokens: int):
        self._out, self._partial = out, out.with_name(out.name + PARTIAL)
        self._vocab, self._end, self._tokenizer = vocab, end_of_document, tokenizer
        self._shard_tokens = shard_tokens
        self._dtype_name = smallest_dtype(vocab)
        self._dtype = DTYPES[self._dtype_name]
        self._shards: list[Shard] = []
        self._tokens: list[np.ndarray[Any, Any]] = []
        self._starts: list[int] = []
        self._buffered = self._in_shard = self._documents_in_shard = 0
        self._opened = False
        self._open_files = ExitStack()

    def __enter__(self) -> Self:
        for path in (self._out, self._partial):
            if path.exists() or path.is_symlink():
                left = (
                    ": it is the unfinished output of an engine tokenize that was interrupted or is still running"
                    * (path != self._out)
                )
                raise DataError(f"{path} exists{left}; legal: remove it, or choose another folder for --out")
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise DataError(f"cannot create {self._partial}: {error.strerror}") from None
        return self

    def begin_document(self) -> None:
        if self._in_shard >= self._shard_tokens:
            self._end_shard()
        self._starts.append(self._in_shard)
        self._documents_in_shard += 1

    def add(self, ids: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Append tokens to the document. Raises DataError for an id outside the vocabulary."""
        tokens = np.asarray(ids, np.int64)
        if not len(tokens):
            return
        if int(tokens.max()) >= self._vocab or int(tokens.min()) < 0:
            raise DataError(
                f"the tokenizer produced the token {int(tokens.max())}; legal: below {self._vocab}"
            )
        self._tokens.append(tokens.astype(self._dtype))
        self._in_shard += len(tokens)
        self._buffered += len(tokens)
        if self._buffered >= BUFFERED:
            self._flush()

    def end_document(self) -> None:
        self.add([self._end])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._complete()
        except OSError as failed:
            self._remove()
            raise DataError(f"cannot write {self._partial}: {failed.strerror}") from None
        except DataError:
            self._remove()
            raise
        if kind is not None:
            self._remove()
            if isinstance(error, OSError) and error.filename is None:  # for example, because the disk is full
                raise DataError(f"cannot write {self._partial}: {error.strerror}") from None

    @property
    def index(self) -> Index:
        return Index(
            format=FORMAT,
            dtype=self._dtype_name,  # type: ignore[arg-type]
            vocab=self._vocab,
            end_of_document=self._end,
            tokenizer=self._tokenizer,
            shards=self._shards,
        )

    def _complete(self) -> None:
        if self._in_shard:
            self._end_shard()
        if not self._shards:
            raise DataError("the inputs contain no document; legal: at least one")
        path = self._partial / INDEX
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self.index), indent=1) + b"\n")
        with path.open("rb") as file:
            os.fsync(file.fileno())
        os.rename(self._partial, self._out)

    def _flush(self) -> None:
        if not self._opened:
            files = shard_files(self._partial, len(self._shards))
            self._files = [self._open_files.enter_context(path.open("xb")) for path in files]
            self._opened = True
        tokens, starts = self._files
        for part in self._tokens:
            tokens.write(part.data)
        starts.write(np.array(self._starts, STARTS).data)
        self._tokens, self._starts, self._buffered = [], [], 0

    def _end_shard(self) -> None:
        self._flush()
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        self._open_files.close()
        self._opened = False
        digest = digest_of(*shard_files(self._partial, len(self._shards)))
        self._shards.append(Shard(self._in_shard, self._documents_in_shard, digest))
        self._in_shard = self._documents_in_shard = 0

    def _remove(self) -> None:
        self._open_files.close()
        shutil.rmtree(self._partial, ignore_errors=True)
