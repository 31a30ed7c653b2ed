"""The ranks of a torch.distributed job: an all-gather for `agents.join(agree=)`, and facts about a rank."""

import functools
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import agents
from agents.loop.coordinates import batch_of
from agents.loop.loop import Loop
from agents.loop.vote import Agree
from agents.rank.vote import LEADER

if TYPE_CHECKING:
    import torch

LEAVE_S = 2.0  # how long rank 0 keeps its hub at the end, for the last acks of the other ranks


class TorchRanks:
    """This process as a rank of the job's process group; the only rank if there is no group.

    The constructor is a collective call. The constructor creates a separate gloo group: gloo does not wait for the GPU,
    and in a separate group, these collectives do not mix with those of the training program.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        together = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if together else 0
        self.world: int = dist.get_world_size() if together else 1
        self._group: Any = dist.new_group(backend="gloo") if self.world > 1 else None
        self._store: Any = dist.distributed_c10d._get_default_store() if self.world > 1 else None

    def join(self, axes: Mapping[str, int], known: Mapping[str, Any], join: Mapping[str, Any]) -> Loop:
        """Join a run as this rank. `axes`: this rank's coordinates, which tell which ranks share their tokens; `known`:
        further arguments for `agents.join`; `join`: those of the program, which replace the others."""
        own: dict[str, Any] = {"rank": self.rank, "world": self.world, "agree": self.agree, "axes": axes}
        loop = agents.join(**(own | {"first_step": 1} | dict(known) | dict(join)))
        if (batch := batch_of(axes)) is not None:  # also if the program shows the ranks on other axes
            loop.batch = batch
        return loop

    @property
    def agree(self) -> Agree | None:
        """The all-gather for `agents.join`; None if there is only one rank."""
        return all_gather_over(self._group) if self.world > 1 else None

    def sum(self, counts: "torch.Tensor") -> "torch.Tensor":
        """The sum of integer `counts` over all ranks, on the CPU. This call is a collective; all ranks pass tensors of
        the same shape."""
        import torch.distributed as dist

        total = counts.cpu()
        if self.world > 1:
            dist.all_reduce(total, group=self._group)
        return total

    def leave(self, loop: Loop) -> None:
        """Close `loop` after the last step. Rank 0 closes its loop last, because it may have started the hub, to which
        the other ranks send their last acks. Collective."""
        import torch.distributed as dist

        if self.rank != LEADER:
            loop.close()
        if self.world > 1:
            dist.barrier(group=self._group)
        loop.close()

    def await_others(self) -> None:
        """On rank 0, wait at most `LEAVE_S` seconds until all other ranks have called this method; they call it after
        sending their last acks. On the other ranks, this call returns at once. This call is not a collective: each rank
        sets a key in the store of the process group.
        """
        with suppress(Exception):  # another rank may have failed, or the launcher may have ended
            keys = [f"cockpit/{self._group.group_name}/{rank}" for rank in range(self.world)]
            if self.rank != LEADER:
                self._store.set(keys[self.rank], "left")
            else:
                self._store.wait(keys[1:], timedelta(seconds=LEAVE_S))


def join_ranks(run: str, **join: Any) -> Loop:
    """Join a run as this rank of the job's process group, for plain torch loops such as those with DDP. Collective.

    The ranks are on one axis, `dp`, unless `axes=` says otherwise. `join`: further arguments for `agents.join`.
    """
    ranks = TorchRanks()
    axes = {"dp": ranks.rank} if ranks.world > 1 else {}
    known: dict[str, Any] = {"rank": ranks.rank, "world": ranks.world, "agree": ranks.agree, "axes": axes}
    loop = agents.join(run, **(known | join))
    if ranks.world > 1:
        loop.at_close(ranks.await_others)
    return loop


def coordinates_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """The coordinates of `rank` on the axes with more than one rank. `sizes`: the number of ranks on each axis, the
    outermost first, so that neighbouring ranks differ on the last axis."""
    coords: dict[str, int] = {}
    for axis in reversed(list(sizes)):
        if sizes[axis] > 1:
            coords = {axis: rank % sizes[axis]} | coords
        rank //= sizes[axis]
    return coords


def own_part(count: int, parts: int, at: int) -> int:
    """Part number `at` of `count` tokens that `parts` ranks divide among themselves; the parts add up to `count`."""
    return (count + at) // parts


LENGTH = 4  # bytes that contain the number of a rank's bytes
LEAST, MOST = 128, 1 << 16  # bytes that each rank sends in the first all-gather
SPARE = 32  # bytes by which the next step may be longer


def all_gather_over(group: Any) -> Agree:
    """An all-gather over a gloo group, for the parameter `agree` of `agents.join`. Each call starts with an all-gather
    of buffers that have room for the longest message of the previous call, because messages of successive steps have
    similar lengths. If a rank has a longer message, such as one with a command, a second all-gather on all ranks sends
    the rest.
    """
    import torch
    import torch.distributed as dist

    world, width = dist.get_world_size(group), LEAST

    def gather(mine: bytes, width: int) -> bytes:
        row = torch.frombuffer(bytearray(mine.ljust(width, b"\0")), dtype=torch.uint8)
        rows = torch.empty(world, width, dtype=torch.uint8)
        # `dist.all_gather` would check its arguments first, which takes a quarter of the CPU time of the exchange.
        group.allgather([list(rows.unbind())], [row]).wait()
        return rows.numpy().tobytes()

    def agree(mine: bytes) -> Sequence[bytes]:
        nonlocal width
        room = width - LENGTH
        heads = gather(len(mine).to_bytes(LENGTH) + mine[:room], width)
        rows = [heads[start : start + width] for start in range(0, world * width, width)]
        lengths = [int.from_bytes(row[:LENGTH]) for row in rows]
        more = max(lengths) - room
        tails = gather(mine[room:], more) if more > 0 else b""
        # All ranks have the same lengths, so the width stays equal on all ranks.
        width = min(MOST, max(LEAST, LENGTH + max(lengths) + SPARE))
        more = max(0, more)
        return [
            (row[LENGTH:] + tails[number * more : (number + 1) * more])[:length]
            for number, (row, length) in enumerate(zip(rows, lengths, strict=True))
        ]

    return agree


def device_number(device: Any) -> int | None:
    """The CUDA index of a torch device; None if the device is not a GPU."""
    return device.index if device.type == "cuda" else None


def memory_bytes() -> int:
    """The peak memory of this rank's tensors on its GPU; without a GPU, the resident memory of the
    process."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.max_memory_allocated())
    return int(_process(os.getpid()).memory_info().rss)


@functools.lru_cache(1)
def _process(pid: int) -> Any:
    """The `psutil.Process` of this process, cached because it is slow to create."""
    import psutil

    return psutil.Process(pid)


def token_count(batch: Any) -> int | None:
    """The number of tokens in a batch, padding included; None if the batch has no `input_ids`."""
    if hasattr(batch, "numel"):
        return None  # a tensor would warn about such an index
    try:
        return int(batch["input_ids"].numel())
    except (AttributeError, KeyError, IndexError, TypeError):
        return None
