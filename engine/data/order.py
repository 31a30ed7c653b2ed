"""The order of samples: maps a sample number to a source (a folder of token shards) and a sample of this source, in
constant memory and without state.

Sample numbers are divided into blocks of consecutive numbers. In each block, each source has a fixed share of the
sample numbers, in a seeded order. After each block, the sources have therefore contributed exactly their shares, and
the samples of earlier blocks need not be counted. Each source counts its own epochs. In an epoch a source yields each
of its samples once, in a seeded order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.data.permutation import Numbers, Permutation

BLOCK = 2**16  # numbers in a block, if weights are given


def shares_of(weights: Sequence[float]) -> list[int]:
    """Number of samples of each source in a block of BLOCK samples: at least 1, and otherwise proportional to `weights`
    (largest-remainder method)."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: shares[n] - exact[n])
    for n in range(BLOCK - sum(shares)):
        shares[by_remainder[n % len(shares)]] += 1
    while sum(shares) > BLOCK:  # several small shares were raised to 1
        shares[max(range(len(shares)), key=shares.__getitem__)] -= 1
    return shares


@dataclass(frozen=True)
class Places:
    """Where the samples with the requested numbers are: the source of each sample, its index in the source, and the
    epoch of the source."""

    source: Numbers
    index: Numbers
    epoch: Numbers


class SampleOrder:
    """Maps sample numbers 0, 1, 2 ... to samples of several sources; `sizes`: number of samples of each source.

    Without `weights`, a block is one epoch of all sources together and contains each sample once. With `weights`, a
    block has BLOCK samples, and each source contributes in proportion to its weight. With weights, the sources may
    therefore be in different epochs at the same time.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None, seed: int):
        self.sizes, self._seed = sizes, seed
        self._weighted = weights is not None
        self._shares = list(sizes) if weights is None else shares_of(weights)
        self._starts = np.cumsum([0, *self._shares])
        self._block = int(self._starts[-1])
        self._tables: dict[int, tuple[Numbers, Numbers]] = {}  # the two newest blocks, if weighted

    def __call__(self, numbers: Numbers) -> Places:
        blocks = numbers // self._block
        source, nth = self._in_blocks(numbers % self._block, blocks)
        sizes = np.array(self.sizes, np.int64)[source]
        epoch, index = nth // sizes, nth % sizes
        for s, e in sorted({*zip(source.tolist(), epoch.tolist(), strict=True)}):
            here = (source == s) & (epoch == e)
            index[here] = Permutation(self.sizes[s], f"{self._seed}/source {s}/epoch {e}")(index[here])
        return Places(source, index, epoch)

    def samples_in(self, epochs: int) -> int:
        """Number of samples that can be drawn before any source begins its (`epochs` + 1)-th epoch."""
        if not self._weighted:
            return epochs * self._block
        block = min(epochs * size // share for size, share in zip(self.sizes, self._shares, strict=True))
        source, nth = self._table(block)
        over = nth >= epochs * np.array(self.sizes, np.int64)[source]
        return block * self._block + int(over.argmax())

    def _in_blocks(self, within: Numbers, blocks: Numbers) -> tuple[Numbers, Numbers]:
        """For each sample number, given as a block and a position in the block: its source, and its number among the
        samples of this source, counted through all blocks. With weights, this number increases with the position in the
        block; without weights, the numbers within a block are shuffled."""
        source, nth = np.empty_like(within), np.empty_like(within)
        for b in {*blocks.tolist()}:
            here = blocks == b
            if self._weighted:
                source[here], nth[here] = (column[within[here]] for column in self._table(b))
            else:  # each block is one epoch, in shuffled order
                place = Permutation(self._block, f"{self._seed}/block {b}")(within[here])
                source[here] = at = np.searchsorted(self._starts, place, "right") - 1
                nth[here] = b * np.array(self._shares, np.int64)[at] + place - self._starts[at]
        return source, nth

    def _table(self, block: int) -> tuple[Numbers, Numbers]:
        """For each position in the block with number `block`: the source of the sample, and how many samples from the
        same source come before it, in this block and in all earlier blocks."""
        if block not in self._tables:
            place = Permutation(self._block, f"{self._seed}/block {block}")(np.arange(self._block))
            source = np.searchsorted(self._starts, place, "right") - 1
            nth = np.empty_like(source)
            nth[source.argsort(kind="stable")] = np.arange(self._block)
            nth += block * np.array(self._shares, np.int64)[source] - self._starts[source]
            self._tables = dict([*self._tables.items()][-1:]) | {block: (source, nth)}
        return self._tables[block]
