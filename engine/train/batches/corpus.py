"""Reads the training text as bytes from files on this machine. Torch-free, because the parent process reads the text
before it forks the processes of the ranks."""

import glob
import hashlib
import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.config.sections.data import Data
from engine.data.mixture import Batch, Text, Windows, read_shards, starts_of

BYTES = 256  # vocabulary of the byte tokenizer


@dataclass(frozen=True)
class Corpus:
    """Training text; each byte is a token."""

    text: npt.NDArray[np.uint8]

    @cached_property
    def digest(self) -> str:
        """Digest of the text, cached. Read this property before the fork, so that the digest is computed only once
        (about 1 GB/s)."""
        return f"blake2b-{hashlib.blake2b(self.text.data, digest_size=8).hexdigest()}"

    def windows(self, seq_len: int, global_batch: int, seed: int, documents: bool = False) -> Windows:
        return RandomWindows(self, seq_len, global_batch, seed, documents)


@dataclass(frozen=True)
class RandomWindows:
    """Random windows of a corpus, drawn with replacement. A zero byte marks the end of a document."""

    corpus: Corpus
    seq_len: int
    global_batch: int
    seed: int
    documents: bool = False

    def batch(self, step: int, first: int, count: int) -> Batch:
        text = self.corpus.text
        rng = np.random.Generator(np.random.Philox(key=self.seed, counter=step << 64))
        starts = rng.integers(0, len(text) - self.seq_len - 1, self.global_batch)
        indexes = starts[first : first + count, None] + np.arange(self.seq_len + 1)
        tokens = text[indexes].astype(np.int64)
        return Batch(tokens, starts_of(tokens[:, : self.seq_len - 1] == 0) if self.documents else None)


def read_text(layout: Layout, section: str = "data") -> Text:
    """Read the text that the run's configuration (`layout.data`) names: token shards, or a corpus. `section`: the
    layout section that error messages refer to. Raises RefusedError."""
    if layout.data.source == "shards":
        return read_shards(layout)
    return read_corpus(layout, section)


def validation_text(layout: Layout) -> Text | None:
    """The text selected by the layout's section [validation]; None if the run measures no validation loss. Raises
    RefusedError."""
    wanted = layout.validation
    if not wanted.every:
        return None
    data = Data(source=wanted.source, shards=wanted.shards)
    return read_text(msgspec.structs.replace(layout, data=data), "validation")


def read_corpus(layout: Layout, section: str = "data") -> Corpus:
    """The content of the files that `data.source` selects, in order of their names, with a zero byte between two files.

    Raises LayoutError if the model's vocabulary is smaller than that of bytes, if there is no file, if a file cannot be
    read, if the text is too short for one sequence, or if its digest is not `data.digest`.
    """
    source, seq_len, vocab = layout.data.source, layout.model.seq_len, layout.model.vocab
    if vocab < BYTES:
        raise LayoutError(
            f"{section}.source = {source!r} has byte tokens, but model.vocab = {vocab}; legal: a model.vocab of at "
            f"least {BYTES}, or {section}.source = shards"
        )
    files = _files(source)
    if not files:
        raise LayoutError(f"{section}.source = {source!r} names no file on this machine")
    size = sum(path.stat().st_size for path in files) + len(files) - 1
    if size < seq_len + 2:
        raise LayoutError(
            f"{section}.source = {source!r} holds {size} bytes, too few for model.seq_len = {seq_len}"
        )
    whole = np.zeros(size, np.uint8)
    end = 0
    for path in files:
        try:
            text = np.fromfile(path, np.uint8)
        except OSError as error:
            raise LayoutError(
                f"{section}.source = {source!r}: {path} cannot be read: {error.strerror}"
            ) from None
        text = text[: size - end]  # the file may have grown since its size was read
        whole[end : end + len(text)] = text
        end += len(text) + 1
    corpus = Corpus(whole)
    if layout.data.digest not in (None, corpus.digest):
        raise LayoutError(
            f"data.digest = {layout.data.digest}, but the files of data.source = {source!r} on this machine have "
            f"{corpus.digest}; set data.digest to that digest or to none, or use the intended files"
        )
    return corpus


def _files(source: str) -> list[Path]:
    if source == "stdlib":
        return _standard_library()
    found = map(Path, glob.glob(source.partition(":")[2], recursive=True))
    return sorted(path for path in found if path.is_file() and os.access(path, os.R_OK))


def _standard_library() -> list[Path]:
    """The source files of the standard library, without installed packages."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = sys.stdlib_module_names
    modules = [path for path in library.glob("*.py") if path.stem in names]
    return sorted(modules) + sorted(path for path in library.glob("*/*.py") if path.parent.name in names)
