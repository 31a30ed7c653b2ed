"""The one door for collectives: every byte that leaves a rank passes here and is metered by axis.

On gloo a ring collective pays its latency P - 1 times over. The same bytes as one all-to-all plus a local sum or copy
wait up to 5 times less (docs/measurements.md), so that form is taken there; NCCL gets its native collectives.

Shapes: B sequences, S tokens of a slice, D model. Axes of size 1 communicate nothing and cost nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from engine.metering.clocks import Clock, Mark, WallClock
from engine.metering.meter import Meter

# Below this a gloo all-reduce is all latency, and one hop with P times the bytes is quicker.
FEW_BYTES = 1 << 20


class AsyncCollective:
    """A collective under way, metered when it is awaited: the wait is exposed, what went before was hidden.

    `finish` does what is left to do once its data is there. Without `works` there is nothing to wait for. Where the
    end cannot be `noted` (gloo's sends have no future), it counts as under way until it is awaited.
    """

    def __init__(
        self,
        axis: "Axis",
        kind: str,
        sent_bytes: int,
        works: Sequence[dist.Work],
        finish: Callable[[], object] = lambda: None,
        noted: bool = True,
    ):
        self._axis, self._kind, self._sent_bytes = axis, kind, sent_bytes
        self._works, self._finish = works, finish
        self._began = axis.clock.mark()
        self._over: Mark = None
        if works and noted:
            works[-1].get_future().add_done_callback(self._note)

    def _note(self, _: object) -> None:
        self._over = self._axis.clock.mark()

    def wait(self) -> None:
        if not self._works:
            return
        axis, over = self._axis, self._over
        waiting = axis.clock.mark()
        with axis.metered(self._kind, self._sent_bytes):
            for work in self._works:
                work.wait()
            self._finish()
        lane = axis.meter.readings.lanes[axis.name]
        axis.clock.between(self._began, waiting if over is None else over, lane.hide)


class Axis:
    """One mesh axis as this rank sees it: its group, its size, its place in it, and the collectives over it."""

    def __init__(self, name: str, group: ProcessGroup | None, meter: Meter):
        self.name = name
        self.group = group
        self.meter = meter
        self.size = group.size() if group else 1
        self.rank = group.rank() if group else 0
        self.peers = dist.get_process_group_ranks(group) if group else []  # as ranks of the world
        self._gloo = group is not None and dist.get_backend(group) == "gloo"
        # On gloo it is the host that waits, whatever the device.
        self.clock: Clock = WallClock() if self._gloo else meter.clock

    def metered(
        self, kind: str, sent_bytes: int, to: Mapping[int, int] | None = None
    ) -> AbstractContextManager[None]:
        return self.meter.collective(self.name, kind, sent_bytes, to, self.clock)

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] of every rank as [P, ...]."""
        if self.size == 1:
            return x.unsqueeze(0)
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        with self.metered("all-gather", (self.size - 1) * x.nbytes):
            if self._gloo:
                dist.all_to_all_single(out, x.expand_as(out).contiguous(), group=self.group)
            else:
                dist.all_gather_into_tensor(out, x, group=self.group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[P, ...]: the sum over ranks of this rank's row, [...]."""
        if self.size == 1:
            return x[0]
        x = x.contiguous()
        with self.metered("reduce-scatter", x.nbytes // self.size * (self.size - 1)):
            if self._gloo:
                rows = torch.empty_like(x)
                dist.all_to_all_single(rows, x, group=self.group)
                return rows.sum(0)
            out = torch.empty_like(x[0])
            dist.reduce_scatter_tensor(out, x, group=self.group)
            return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on each."""
        if self.size == 1:
            return x
        with self.metered("all-reduce", 2 * x.nbytes * (self.size - 1) // self.size):
            if self._gloo and x.nbytes * self.size <= FEW_BYTES:
                rows = x.new_empty((self.size, *x.shape))
                dist.all_to_all_single(rows, x.expand_as(rows).contiguous(), group=self.group)
                return rows.sum(0)
            out = x.clone()
            dist.all_reduce(out, group=self.group)
            return out

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int], out: Tensor | None = None) -> Tensor:
        """Rows of `x`, `send[p]` of them to rank p; the `receive[p]` rows that came from each p, in rank order."""
        if self.size == 1:
            return x
        if out is None:
            out = x.new_empty((sum(receive), *x.shape[1:]))
        row = x.nbytes // max(1, x.shape[0])
        me = self.peers[self.rank]
        to = {peer: n * row for peer, n in zip(self.peers, send, strict=True) if n and peer != me}
        with self.metered("all-to-all", sum(to.values()), to):
            dist.all_to_all_single(out, x.contiguous(), receive, send, group=self.group)
        return out

    def exchange(self, x: Tensor) -> Tensor:
        """Row p of [P, ...] to rank p; row p of the result came from p."""
        if self.size == 1:
            return x
        x = x.contiguous()
        out = torch.empty_like(x)
        with self.metered("exchange", x.nbytes // self.size * (self.size - 1)):
            dist.all_to_all_single(out, x, group=self.group)
        return out

    def start_broadcast(self, x: Tensor, root: int) -> AsyncCollective:
        """`x` of group rank `root` into everybody's `x`, without waiting."""
        if self.size == 1:
            return AsyncCollective(self, "broadcast", 0, ())
        work = dist.broadcast(x, group_src=root, group=self.group, async_op=True)
        return AsyncCollective(self, "broadcast", x.nbytes if self.rank == root else 0, (work,))

    def start_gather(self, x: Tensor, root: int) -> tuple[AsyncCollective, list[Tensor]]:
        """`x` of every rank to `root`, without waiting; the rows are there, on the root alone, once awaited."""
        if self.size == 1:
            return AsyncCollective(self, "gather", 0, ()), [x]
        rows = [torch.empty_like(x) for _ in range(self.size)] if self.rank == root else []
        work = dist.gather(x, rows or None, group_dst=root, group=self.group, async_op=True)
        return AsyncCollective(self, "gather", 0 if self.rank == root else x.nbytes, (work,)), rows

    def start_ring(self, x: Tensor) -> tuple[AsyncCollective, Tensor]:
        """`x` to the next rank, without waiting; what the rank before sends is there once awaited."""
        if self.size == 1:
            return AsyncCollective(self, "ring", 0, ()), x
        x = x.contiguous()
        coming = torch.empty_like(x)
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=to),
            dist.P2POp(dist.irecv, coming, group=self.group, group_peer=source),
        ]
        return AsyncCollective(
            self, "ring", x.nbytes, dist.batch_isend_irecv(operations), noted=False
        ), coming

    def start_all_gather(self, out: Tensor, x: Tensor) -> AsyncCollective:
        """[n] of every rank into `out` [P n], there once awaited."""
        sent = (self.size - 1) * x.nbytes
        if self._gloo:
            mine = x.expand(self.size, -1).contiguous()
            work = dist.all_to_all_single(out.view(self.size, -1), mine, group=self.group, async_op=True)
            return AsyncCollective(self, "all-gather", sent, (work,))
        with self.metered("all-gather", sent):
            dist.all_gather_into_tensor(out, x, group=self.group)
        return AsyncCollective(self, "all-gather", sent, ())

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> AsyncCollective:
        """The sum over ranks of this rank's part of `x` [P n] into `out` [n], there once awaited."""
        sent = x.nbytes // self.size * (self.size - 1)
        if self._gloo:
            rows = torch.empty_like(x).view(self.size, -1)
            work = dist.all_to_all_single(rows, x.view(self.size, -1), group=self.group, async_op=True)
            return AsyncCollective(self, "reduce-scatter", sent, (work,), lambda: torch.sum(rows, 0, out=out))
        with self.metered("reduce-scatter", sent):
            dist.reduce_scatter_tensor(out, x, group=self.group)
        return AsyncCollective(self, "reduce-scatter", sent, ())

    def start_all_reduce(self, x: Tensor) -> AsyncCollective:
        """The sum over ranks in place of `x` [n], there once awaited, the same bits on each."""
        sent = 2 * x.nbytes * (self.size - 1) // self.size
        if not self._gloo:
            with self.metered("all-reduce", sent):
                dist.all_reduce(x, group=self.group)
            return AsyncCollective(self, "all-reduce", sent, ())
        if x.nbytes * self.size > FEW_BYTES:
            work = dist.all_reduce(x, group=self.group, async_op=True)
            return AsyncCollective(self, "all-reduce", sent, (work,))
        rows = x.new_empty(self.size, x.numel())
        mine = x.expand(self.size, -1).contiguous()
        work = dist.all_to_all_single(rows, mine, group=self.group, async_op=True)
        return AsyncCollective(self, "all-reduce", sent, (work,), lambda: torch.sum(rows, 0, out=x))

    def start_exchange(self, x: Tensor, peers: list[int]) -> tuple[AsyncCollective, list[Tensor]]:
        """`x` of each of `peers`, ranks of the world and this one among them, to all of them, without waiting; the
        rows are there, in the order of `peers`, once awaited."""
        me = self.peers[self.rank]
        rows = [x if peer == me else torch.empty_like(x) for peer in peers]
        works = [
            work
            for peer, row in zip(peers, rows, strict=True)
            if peer != me
            for work in (dist.isend(x, peer, self.group), dist.irecv(row, peer, self.group))
            if work is not None
        ]
        return AsyncCollective(self, "exchange", (len(peers) - 1) * x.nbytes, works, noted=False), rows
