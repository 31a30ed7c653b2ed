"""Batches of the corpus. A sample depends on (seed, step, index) only, never on the layout.

So the loader has no state but the step number, and any layout resumes any other.
"""

import numpy as np
import torch
from torch import Tensor

from engine.corpus import Corpus
from engine.device import CPU, sent


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
        self._corpus, self._seq_len, self._global_batch, self._seed = corpus, seq_len, global_batch, seed
        self._positions = np.arange(seq_len) if positions is None else positions.numpy()

    def batch(self, step: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [count, positions] of the step's sequences `first` to `first + count`."""
        rng = np.random.Generator(np.random.Philox(key=self._seed, counter=step << 64))
        starts = rng.integers(0, len(self._corpus) - self._seq_len - 1, self._global_batch)
        at = starts[first : first + count, None] + self._positions
        inputs, targets = self._corpus[at].astype(np.int64), self._corpus[at + 1].astype(np.int64)
        return sent(torch.from_numpy(inputs), self._device), sent(torch.from_numpy(targets), self._device)
