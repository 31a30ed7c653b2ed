"""Batches of the corpus. A sample depends on (seed, step, index) only, never on the layout.

So the loader has no state but the step number, and any layout resumes any other.
"""

import numpy as np
import torch
from torch import Tensor

from engine.corpus import Corpus


class Samples:
    """Random windows of a corpus: [sequences, seq_len + 1] bytes as token ids."""

    def __init__(self, corpus: Corpus, seq_len: int, global_batch: int, seed: int):
        self._corpus, self._seq_len, self._global_batch, self._seed = corpus, seq_len, global_batch, seed

    def batch(self, step: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [count, S] of the step's sequences `first` to `first + count`."""
        rng = np.random.Generator(np.random.Philox(key=self._seed, counter=step << 64))
        starts = rng.integers(0, len(self._corpus) - self._seq_len - 1, self._global_batch)
        windows = starts[first : first + count, None] + np.arange(self._seq_len + 1)
        tokens = torch.from_numpy(self._corpus[windows].astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
