"""Batches of the corpus. A sample depends on (seed, step, index) only, never on the layout.

So the loader has no state but the step number, and any layout resumes any other.
"""

import numpy as np
import torch
from torch import Tensor

from engine.config.refusal import LayoutError
from engine.device import CPU, to_device
from engine.parallel.collectives import Axis
from engine.train.corpus import Corpus


class Samples:
    """Random windows of a corpus, bytes as token ids; of each window, the tokens at `positions` (all if left out)."""

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        global_batch: int,
        seed: int,
        positions: Tensor | None = None,
        device: torch.device = CPU,
    ):
        self._device = device
        self._text, self._seq_len, self._global_batch, self._seed = corpus.text, seq_len, global_batch, seed
        self._positions = np.arange(seq_len) if positions is None else positions.numpy()

    def batch(self, step: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [count, positions] of the step's sequences `first` to `first + count`."""
        rng = np.random.Generator(np.random.Philox(key=self._seed, counter=step << 64))
        starts = rng.integers(0, len(self._text) - self._seq_len - 1, self._global_batch)
        at = starts[first : first + count, None] + self._positions
        inputs, targets = self._text[at].astype(np.int64), self._text[at + 1].astype(np.int64)
        return to_device(torch.from_numpy(inputs), self._device), to_device(
            torch.from_numpy(targets), self._device
        )


def agree_on_corpus(corpus: Corpus, source: str, control: Axis) -> None:
    """LayoutError, the same on every rank, if two ranks have read other texts.

    They would draw other windows, and in a pipeline, where the first stage reads the inputs and the last the targets,
    the targets would be of another text than the inputs. The same call on every rank of `control`.
    """
    told = torch.frombuffer(bytearray(corpus.digest.encode()), dtype=torch.uint8)
    digests = [bytes(row.tolist()).decode() for row in control.all_gather(told)]
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        more = f" (and {len(others) - 1} more)" if others[1:] else ""
        raise LayoutError(
            f"rank {others[0]}{more} has read another text than rank 0: data.source = {source!r} has the digest "
            f"{digests[others[0]]} there and {digests[0]} on rank 0; legal: the same files on every machine, and for "
            "stdlib the same release of Python"
        )
