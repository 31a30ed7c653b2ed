"""Reading a part of a saved tensor reads the bytes of this part."""

import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from engine.checkpoint.storage import LEAST_RUN, Reader
from engine.checkpoint.tensor_index import INDEX, Chunk, Stored, write_index

AT = 24  # bytes before the tensor in its file


class Planner:
    """Takes the place of torch's planner: the reader fills `target`."""

    def __init__(self, target: torch.Tensor):
        self.target = target

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.target

    def commit_tensor(self, item: ReadItem, target: torch.Tensor) -> None:
        pass


def part_of(
    folder: Path, whole: np.ndarray[Any, Any], offsets: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor:
    """Write `whole` as one chunk, and read the part with the given offsets and lengths."""
    (folder / "rank-0.bin").write_bytes(b"x" * AT + whole.tobytes())
    stored = Stored("float32", whole.shape, [Chunk((0,) * whole.ndim, whole.shape, "rank-0.bin", AT)])
    (folder / INDEX).write_bytes(write_index({"w": stored}))
    reader = Reader(folder, {"rank-0.bin": AT + whole.nbytes, INDEX: 1})
    reader.read_metadata()
    target = torch.full(tuple(lengths), -1.0)
    index = MetadataIndex("w", torch.Size([0] * whole.ndim))
    item = ReadItem(
        LoadItemType.TENSOR,
        index,
        torch.Size([0] * whole.ndim),
        index,
        torch.Size(offsets),
        torch.Size(lengths),
    )
    reader.read_data(LoadPlan([item]), Planner(target)).wait()  # type: ignore[arg-type]
    return target


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads with `os.preadv`, which the reader uses for tensors."""
    sizes: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Sequence[memoryview], at: int) -> int:
        count = preadv(descriptor, buffers, at)
        sizes.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    return sizes


def boxes(shape: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and lengths of parts: along each dim all of it, its first element, or some elements inside."""
    along = [[(0, n), (0, 1), (n // 3, max(1, n // 2))] for n in shape]
    return [(tuple(o for o, _ in one), tuple(n for _, n in one)) for one in product(*along)]


@pytest.mark.parametrize("shape", [(), (7,), (5, 40), (4, 3, 50), (2, 3, 4, 5)])
def test_every_part_has_the_values_of_the_slice(tmp_path: Path, shape: tuple[int, ...]) -> None:
    whole = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    for offsets, lengths in boxes(shape):
        expected = whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        assert np.array_equal(part_of(tmp_path, whole, offsets, lengths).numpy(), expected), (
            offsets,
            lengths,
        )


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_rank_of_eight_reads_an_eighth(tmp_path: Path, read_bytes: list[int], dim: int) -> None:
    """Along each dim of a saved tensor that eight ranks share, such as the one that `engine import-hf` writes."""
    whole = np.zeros((16, 24, 8 * LEAST_RUN // 4), dtype=np.float32)
    lengths = [n // 8 if d == dim else n for d, n in enumerate(whole.shape)]
    offsets = [5 * n // 8 if d == dim else 0 for d, n in enumerate(whole.shape)]
    part_of(tmp_path, whole, offsets, lengths)
    assert sum(read_bytes) == whole.nbytes // 8


def test_tiny_runs_are_not_read_one_by_one(tmp_path: Path, read_bytes: list[int]) -> None:
    whole = np.zeros((1000, 4), dtype=np.float32)
    part_of(tmp_path, whole, (0, 1), (1000, 1))
    assert read_bytes == [whole.nbytes]
