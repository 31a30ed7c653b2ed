"""Training samples from token shards. Each folder of token shards is a source; samples of several sources are mixed in
a fixed order. Torch-free.

A sample is `seq_len` + 1 consecutive tokens of a source. The last token of a sample is only a target, and is also the
first token of the next sample. Documents are concatenated, so a sample may contain several documents or a part of one.
`Batch.starts` contains the positions where documents start. The tokens after the last whole sample of a source are not
used.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.config.layout import Layout
from engine.data.order import SampleOrder
from engine.data.shards import DataError, Source


@dataclass(frozen=True)
class Batch:
    """Consecutive samples of a step: token ids [count, seq_len + 1]. `starts` [count, seq_len]: the position in the
    sample where the document of each input token starts, 0 for a document that began in an earlier sample; None if not
    requested. `epochs`: the first and the last epoch of each source in the whole step; empty if samples are drawn at
    random from the text, without epochs."""

    tokens: NDArray[np.int64]
    starts: NDArray[np.int64] | None = None
    epochs: tuple[tuple[int, int, int], ...] = ()  # source, lowest epoch, highest epoch


class Windows(Protocol):
    """Training text divided into samples. For a given sequence length, batch size and seed, the content of a sample
    depends only on its sample number."""

    def batch(self, step: int, first: int, count: int) -> Batch:
        """`count` samples of a step, beginning with sample number `first` of the step."""
        ...


class Text(Protocol):
    """Training text, from which samples are drawn."""

    @property
    def digest(self) -> str: ...

    def windows(self, seq_len: int, global_batch: int, seed: int, documents: bool = False) -> Windows:
        """The text divided into samples. With `documents`, batches contain the start positions of documents."""
        ...


class TokenShards:
    """Training text that is read from token shards (`data.source = shards` in a layout)."""

    def __init__(self, folders: Sequence[str], weights: Sequence[float] | None):
        self.sources = [Source(Path(folder)) for folder in folders]
        self._weights = weights

    @cached_property
    def digest(self) -> str:
        """Digest of the sources' indexes, which contain the digests of all shards."""
        whole = " ".join(source.digest for source in self.sources)
        return f"blake2b-{hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()}"

    def windows(self, seq_len: int, global_batch: int, seed: int, documents: bool = False) -> "ShardWindows":
        order = SampleOrder([samples_of(source, seq_len) for source in self.sources], self._weights, seed)
        return ShardWindows(self.sources, order, seq_len, global_batch, documents)


class ShardWindows:
    """The training text in token shards, divided into samples. The sample number is step x global_batch + the sample's
    index within the step."""

    def __init__(
        self,
        sources: Sequence[Source],
        order: SampleOrder,
        seq_len: int,
        global_batch: int,
        documents: bool = False,
    ):
        self.order, self._documents = order, documents
        self._sources, self._seq_len, self._global_batch = sources, seq_len, global_batch

    def batch(self, step: int, first: int, count: int) -> Batch:
        places = self.order(step * self._global_batch + np.arange(self._global_batch))
        epochs = tuple(
            (s, int(of_source.min()), int(of_source.max()))
            for s in range(len(self._sources))
            if len(of_source := places.epoch[places.source == s])
        )
        length = self._seq_len
        tokens = np.empty((count, length + 1), np.int64)
        numbers = np.zeros((count, length), np.int64)  # of the documents
        here = slice(first, first + count)
        for row, (source, index) in enumerate(zip(places.source[here], places.index[here], strict=True)):
            at = int(index) * length
            tokens[row], found = self._sources[source].read(at, length + 1, self._documents)
            if found is not None:
                numbers[row] = found[:length]
        starts = starts_of(numbers[:, 1:] != numbers[:, :-1]) if self._documents else None
        return Batch(tokens, starts, epochs)


def starts_of(ends: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each token, the position where its document starts, [count, W]. `ends` [count, W - 1]: whether a token is the
    last of its document."""
    starts = np.zeros((len(ends), ends.shape[1] + 1), np.int64)
    starts[:, 1:] = np.where(ends, np.arange(1, starts.shape[1]), 0)
    return np.maximum.accumulate(starts, 1)


def samples_of(source: Source, seq_len: int) -> int:
    """Number of samples of `seq_len` + 1 tokens in a source (a folder of token shards)."""
    return (len(source) - 1) // seq_len


def read_shards(layout: Layout) -> TokenShards:
    """The token shards that the layout's section [data] names. Raises DataError if a folder is damaged, does not match
    the model, is too short, or has too few samples for the layout's steps and data.epochs."""
    data, model, train = layout.data, layout.model, layout.train
    text = TokenShards(data.shards or (), data.weights)
    first = text.sources[0].index
    for source in text.sources:
        index = source.index
        if index.vocab > model.vocab:
            raise DataError(
                f"{source.folder} has a vocabulary of {index.vocab} tokens, but model.vocab = "
                f"{model.vocab}; legal: at least {index.vocab}"
            )
        if (index.tokenizer, index.end_of_document) != (first.tokenizer, first.end_of_document):
            raise DataError(
                f"{source.folder} was written with the tokenizer {index.tokenizer}, {text.sources[0].folder} with "
                f"{first.tokenizer}; legal: one tokenizer for all folders of data.shards"
            )
        if samples_of(source, model.seq_len) < 1:
            raise DataError(
                f"{source.folder} holds {len(source)} tokens, too few for model.seq_len = {model.seq_len}"
            )
    if data.epochs is not None:
        enough = text.windows(model.seq_len, train.global_batch, layout.run.seed).order.samples_in(
            data.epochs
        )
        if train.steps * train.global_batch > enough:
            raise DataError(
                f"train.steps = {train.steps} of {train.global_batch} samples go beyond the end of the data, which has "
                f"{enough} samples in data.epochs = {data.epochs}; legal: up to {enough // train.global_batch} "
                "steps, or more epochs"
            )
    if data.digest not in (None, text.digest):
        raise DataError(
            f"data.digest = {data.digest}, but the folders of data.shards have {text.digest}; set data.digest "
            "to that digest or to none, or use the intended folders"
        )
    return text
