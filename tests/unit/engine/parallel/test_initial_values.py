"""Initial values do not depend on how a parameter is sharded, and initialising a shard needs no memory for the whole
parameter."""

import hashlib

import pytest
import torch

from engine.parallel import initial_values as subject
from engine.parallel.initial_values import Normal, Stacked, initial_values
from tests.ranks.memory.live_storages import LiveStorages

SHAPE = (37, 12)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "BLOCK", 5 * 12)


@pytest.mark.parametrize(("first", "rows"), [(0, 37), (0, 1), (4, 2), (5, 5), (9, 20), (36, 1), (37, 0)])
@pytest.mark.parametrize(("row", "columns"), [(0, (0, None)), (0, (3, 9)), (7, (0, None))])
def test_a_part_has_the_values_of_the_whole(
    first: int, rows: int, row: int, columns: tuple[int, int | None], small_blocks: None
) -> None:
    whole = initial_values("q", SHAPE, 0.02, 1)
    rows = min(rows, SHAPE[0] - row - first)
    if rows < 0:
        return
    expected = whole[row + first : row + first + rows, slice(*columns)]
    part = torch.full_like(expected, torch.nan)
    Normal("q", SHAPE, 0.02, 1, row, columns).fill(part, first)
    assert torch.equal(part, expected)


def test_stacked_experts_have_values_of_their_own(small_blocks: None) -> None:
    stack = Stacked(tuple(Normal(f"gate.{e}", SHAPE, 0.02, 1) for e in range(3)))
    part = torch.empty(2, *SHAPE)
    stack.fill(part, 1)
    assert torch.equal(part[1], initial_values("gate.2", SHAPE, 0.02, 1))


def test_blocks_have_different_values(small_blocks: None) -> None:
    whole = initial_values("q", SHAPE, 1.0, 1)
    blocks = [tuple(block.flatten().tolist()) for block in whole.split(5) if len(block) == 5]
    assert len(set(blocks)) == len(blocks) == 7
    assert abs(float(whole.mean())) < 0.15 and abs(float(whole.std()) - 1.0) < 0.1


def test_a_parameter_of_one_block_has_the_values_of_earlier_versions() -> None:
    """With other values, the documented results of runs would no longer hold."""
    digest = hashlib.blake2b(b"1/q", digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    assert torch.equal(initial_values("q", SHAPE, 0.02, 1), torch.randn(SHAPE, generator=generator) * 0.02)


def test_the_default_device_does_not_matter() -> None:
    """A program that uses the engine as a library may have called `torch.set_default_device`."""
    filled = torch.empty(SHAPE)
    with torch.device("meta"):
        Normal("q", SHAPE, 0.02, 1).fill(filled, 0)
    assert torch.equal(filled, initial_values("q", SHAPE, 0.02, 1))


def test_a_shard_is_filled_without_the_whole() -> None:
    shape = (1 << 14, 1 << 9)  # 32 MiB
    shard = torch.empty(shape[0] // 8, shape[1])
    with LiveStorages() as live:
        Normal("q", shape, 0.02, 1).fill(shard, 5 * len(shard) + 3)
    assert 0 < live.peak <= 4 * subject.BLOCK
