"""Makes batches from the corpus. A sample depends only on (seed, step, index), not on the layout.

So a run can resume at any step and in another layout, and a checkpoint needs no data loader state.
"""

import numpy as np
import torch
from torch import Tensor

from engine.config.refusal import LayoutError
from engine.device import CPU, to_device
from engine.parallel.collectives import Axis
from engine.train.corpus import Corpus


class Samples:
    """Random windows of a corpus; each byte is a token id. `positions` selects the tokens of each window that this rank
    needs (default: all)."""

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
        """Inputs and targets, [count, positions], of `count` sequences of a step, starting with sequence number
        `first`."""
        rng = np.random.Generator(np.random.Philox(key=self._seed, counter=step << 64))
        starts = rng.integers(0, len(self._text) - self._seq_len - 1, self._global_batch)
        indexes = starts[first : first + count, None] + self._positions
        inputs, targets = self._text[indexes].astype(np.int64), self._text[indexes + 1].astype(np.int64)
        return to_device(torch.from_numpy(inputs), self._device), to_device(
            torch.from_numpy(targets), self._device
        )


def check_same_corpus(corpus: Corpus, source: str, control: Axis) -> None:
    """Check that all ranks have read the same text; if not, raise the same LayoutError on all ranks.

    In a pipeline, the first stage reads the inputs and the last stage the targets: if their texts differed, inputs and
    targets would not match. Collective over `control`.
    """
    mine = torch.frombuffer(bytearray(corpus.digest.encode()), dtype=torch.uint8)
    digests = [bytes(row.tolist()).decode() for row in control.all_gather(mine)]
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        more = f" (and {len(others) - 1} more)" if others[1:] else ""
        raise LayoutError(
            f"rank {others[0]}{more} has read another text than rank 0: data.source = {source!r} has the digest "
            f"{digests[others[0]]} on rank {others[0]} and {digests[0]} on rank 0; legal: the same files on every "
            "machine, and for stdlib the same release of Python"
        )
