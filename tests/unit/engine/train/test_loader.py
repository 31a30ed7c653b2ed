"""The loader: batches in order, bounded read-ahead, and errors that are raised in the training thread."""

import threading
from collections.abc import Iterator

import pytest
import torch

from engine.device import CPU
from engine.train.batches.loader import HostBatch, Loader


class Reads:
    """A fake batch reader; each read waits until the test releases it."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.through = threading.Semaphore(0)

    def __call__(self, step: int, first: int, count: int) -> HostBatch:
        self.through.acquire()
        if step == 13:
            raise OSError("the disk is gone")
        self.steps.append(step)
        return HostBatch((torch.full((count,), step * 100 + first),))


@pytest.fixture
def reads() -> Iterator[Reads]:
    reads = Reads()
    yield reads
    reads.through.release(100)


def test_reads_ahead_up_to_its_depth_and_starts_anew_elsewhere(reads: Reads) -> None:
    before = set(threading.enumerate())
    loader = Loader(reads, 2, CPU)
    reads.through.release(100)
    assert [int(loader.get(step, 4, 1).tensors[0]) for step in range(3)] == [4, 104, 204]
    assert int(loader.get(9, 4, 1).tensors[0]) == 904  # step 9 does not follow step 2, as in a resumed run
    assert int(loader.get(10, 0, 1).tensors[0]) == 1000  # a request for other samples of the step
    loader.close()
    assert reads.steps[:3] == [0, 1, 2]
    # Two steps are in the queue and one is being read, so at most three steps beyond the last one taken.
    assert max(step for step in reads.steps if step < 9) <= 2 + 3
    assert not set(threading.enumerate()) - before


def test_an_error_is_raised_where_the_batch_is_needed(reads: Reads) -> None:
    loader = Loader(reads, 2, CPU)
    reads.through.release(100)
    loader.get(12, 0, 1)
    with pytest.raises(OSError, match="the disk is gone"):
        loader.get(13, 0, 1)
    assert int(loader.get(14, 0, 1).tensors[0]) == 1400
    loader.close()


def test_without_a_thread(reads: Reads) -> None:
    reads.through.release(2)
    loader = Loader(reads, 0, CPU)
    loader.get(5, 0, 1)
    assert reads.steps == [5]
