"""The all-gather of bytes among the ranks of a torch.distributed job."""

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from agents.loop.adapters.torch_ranks import LEAST, LENGTH, all_gather_over, memory_bytes  # noqa: E402

ROOM = LEAST - LENGTH


class Group:
    """A fake process group whose ranks are threads. `gathers`: number of all-gather calls so far, summed over the
    ranks."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch.distributed as dist

        self.gathers = 0
        self._rows: dict[int, Any] = {}
        self._ranks = threading.local()
        self._barrier = threading.Barrier(world)
        self.world = world
        monkeypatch.setattr(dist, "get_world_size", lambda group: world)

    def allgather(self, rows: list[list[Any]], row: list[Any]) -> "Group":
        (self._rows[self._ranks.number],) = row
        self._barrier.wait(10)
        for number, received in enumerate(rows[0]):
            received.copy_(self._rows[number])
        self.gathers += 1
        self._barrier.wait(10)
        return self

    def wait(self) -> None:
        """Does nothing, because `allgather` returns only when the data has been exchanged."""

    def agree(self, *calls: list[bytes]) -> list[list[list[bytes]]]:
        """Call the all-gather once on all ranks for each item of `calls`, which lists the bytes that each rank passes
        to that call. Returns the gathered bytes: for each rank, a list with the result of each call."""
        got: dict[int, list[list[bytes]]] = {}

        def rank(number: int) -> None:
            self._ranks.number = number
            agree = all_gather_over(self)
            got[number] = [list(agree(parts[number])) for parts in calls]

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return [got[number] for number in range(self.world)]


@pytest.mark.parametrize(
    ("parts", "gathers"),
    [
        ([b"", b""], 1),
        ([b"a", b"\0" * ROOM], 1),
        ([b"b" * (ROOM + 1), b""], 2),
        ([b"c" * 5000, bytes(range(256)) * 9], 2),
    ],
)
def test_bytes_of_any_length_arrive_in_order_of_rank(
    parts: list[bytes], gathers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(len(parts), monkeypatch)
    assert group.agree(parts) == [[parts]] * len(parts)
    assert group.gathers == gathers * len(parts)


def test_calls_with_as_many_bytes_as_the_last_one_need_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2, monkeypatch)
    step, command = [b"a" * 900, b"b" * 899], [b"c" * 3000, b"d"]
    calls = [step, step, step, command, step, step]
    assert group.agree(*calls) == [calls] * 2
    assert group.gathers == 2 * (2 + 1 + 1 + 2 + 1 + 1)


def test_memory_of_this_process() -> None:
    before = memory_bytes()
    held = bytearray(64 << 20)
    assert memory_bytes() - before > 32 << 20 and len(held)
