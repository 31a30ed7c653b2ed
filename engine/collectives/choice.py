"""Runs each all-reduce of a process group with the algorithm that was the fastest in the measurements for the size of
the buffer."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from engine.collectives.measured import KIND, TORCH
from engine.collectives.port import Port
from engine.collectives.table import algorithm, sent_bytes
from engine.planner.hardware.description import MeasuredCollective
from engine.planner.timing.measured import similar


class Choice:
    """Chooses an algorithm for each all-reduce of one process group (at least two ranks), and runs it."""

    def __init__(self, rows: Sequence[MeasuredCollective], group: ProcessGroup):
        peers = dist.get_process_group_ranks(group)
        self._rows = similar(rows, KIND, group.size(), peers[1] - peers[0])
        self._group = group

    def row(self, size: int) -> MeasuredCollective | None:
        """The hardware file's entry for the algorithm that was the fastest for a buffer of `size` bytes; None if
        nothing was measured. If the entries were measured with another number of ranks, bytes x ranks is compared
        instead of bytes, as in the planner."""
        ranks = self._group.size()
        for row in self._rows:
            if row.most_bytes is None or size * ranks <= row.most_bytes * row.ranks:
                return row
        return self._rows[-1] if self._rows else None

    def name(self, size: int) -> str:
        """The algorithm for a buffer of `size` bytes: a name in `engine.collectives.table`, `TORCH` (torch's
        all-reduce) or `DIRECT` (one all-to-all of whole buffers)."""
        row = self.row(size)
        return row.algorithm if row else TORCH

    def sent_bytes(self, x: Tensor) -> int:
        """The bytes that this rank sends in `all_reduce(x)`."""
        row = self._own_row(x)
        return sent_bytes(KIND, row.algorithm, Port.of(self._group), x, row.node)

    def all_reduce(self, x: Tensor) -> None:
        """Sum the contiguous tensor `x` over the ranks in place, with the algorithm that `name` returns."""
        row = self._own_row(x)
        algorithm(KIND, row.algorithm, row.node)(Port.of(self._group), x.view(-1))

    def _own_row(self, x: Tensor) -> MeasuredCollective:
        row = self.row(x.nbytes)
        assert row
        return row
