"""Training text as bytes. A sample depends on (seed, step, index) only, never on the layout.

So the loader has no state but the step number, and any layout resumes any other.
"""

import glob
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.layout import Data


class DataError(ValueError):
    """What is wrong with the data, in one sentence."""


def read_corpus(data: Data) -> npt.NDArray[np.uint8]:
    """Every byte of the source's files, in the order of their names, files apart by a zero byte."""
    files = _files(data.source)
    if not files:
        raise DataError(f"data.source = {data.source!r} names no file on this machine")
    return np.frombuffer(b"\0".join(path.read_bytes() for path in files), dtype=np.uint8)


def _files(source: str) -> list[Path]:
    if source == "stdlib":
        library = Path(sysconfig.get_paths()["stdlib"])
        return sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py"))
    return sorted(
        path for path in map(Path, glob.glob(source.partition(":")[2], recursive=True)) if path.is_file()
    )


class Samples:
    """Random windows of a corpus: [sequences, seq_len + 1] bytes as token ids."""

    def __init__(self, corpus: npt.NDArray[np.uint8], seq_len: int, global_batch: int, seed: int):
        if len(corpus) <= seq_len + 1:
            raise DataError(f"the data holds {len(corpus)} bytes, too few for model.seq_len = {seq_len}")
        self._corpus, self._seq_len, self._global_batch, self._seed = corpus, seq_len, global_batch, seed

    def batch(self, step: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [count, S] of the step's sequences `first` to `first + count`."""
        rng = np.random.Generator(np.random.Philox(key=self._seed, counter=step << 64))
        starts = rng.integers(0, len(self._corpus) - self._seq_len - 1, self._global_batch)
        windows = starts[first : first + count, None] + np.arange(self._seq_len + 1)
        tokens = torch.from_numpy(self._corpus[windows].astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
