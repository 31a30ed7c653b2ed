"""Initial values of parameters. A rank computes the values of its shard without computing the whole parameter.

The values depend only on the parameter's name, its whole shape and the seed, so they are the same in every layout. A
parameter is filled in blocks of whole rows. Each block has its own random generator, so a shard needs only the blocks
that it overlaps, one at a time. The seed of the generator is a hash of the run's seed, the parameter's name and, except
in the first block, the block's index.
"""

import hashlib
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 1 << 20  # maximum elements of a block, except that a block has at least one row


class InitialValues(Protocol):
    """The initial values of the part of a parameter that one tp or ep rank holds before FSDP shards it."""

    def fill(self, rows: Tensor, first: int) -> None:
        """Fill `rows` with the values of the parameter's rows from row `first` on. `rows` has the parameter's shape,
        except that it may have fewer rows."""


@dataclass(frozen=True)
class Constant:
    value: float

    def fill(self, rows: Tensor, first: int) -> None:
        rows.fill_(self.value)


@dataclass(frozen=True)
class Normal:
    """Normally distributed initial values of the part of a parameter that a rank holds: the rows from index `row` on
    and, of these, only the columns in the range `columns`. `shape` is the shape of the whole parameter."""

    name: str
    shape: tuple[int, ...]
    std: float
    seed: int
    row: int = 0
    columns: tuple[int, int | None] = (0, None)

    def fill(self, rows: Tensor, first: int) -> None:
        if not rows.numel() or rows.is_meta:
            return
        size = max(1, BLOCK // prod(self.shape[1:]))  # rows of a block
        begin, end = self.row + first, self.row + first + len(rows)
        for block in range(begin // size, -(-end // size)):
            start, stop = block * size, min((block + 1) * size, self.shape[0])
            low, high = max(start, begin), min(stop, end)
            rows[low - begin : high - begin].copy_(
                self._block(block, stop - start)[low - start : high - start]
            )

    def _block(self, block: int, rows: int) -> Tensor:
        """The initial values of `rows` whole rows, drawn with the random generator of block number `block`; only the
        columns in the range `columns` are returned."""
        text = f"{self.seed}/{self.name}" + (f"/{block}" if block else "")
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        shape = (rows, *self.shape[1:])
        # The generator is on the CPU, whatever torch's default device is.
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").mul_(self.std)
        return values[:, slice(*self.columns)] if values.ndim > 1 else values


@dataclass(frozen=True)
class Stacked:
    """The initial values of a stack of parameters of equal shape. Row n contains the values of `items[n]`."""

    items: tuple[Normal, ...]

    def fill(self, rows: Tensor, first: int) -> None:
        for item, row in zip(self.items[first : first + len(rows)], rows, strict=True):
            item.fill(row, 0)


def initial_values(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    """The initial values of a whole parameter, without sharding."""
    values = torch.empty(shape)
    Normal(name, shape, std, seed).fill(values, 0)
    return values
