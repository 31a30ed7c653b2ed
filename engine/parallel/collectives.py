"""Collectives over one mesh axis. All communication of a rank goes through `Axis`, which meters it.

gloo runs an all-gather or a reduce-scatter as a ring, which has the latency of P - 1 messages. One all-to-all of the
same bytes plus a local copy or sum is up to 5 times as fast (docs/measurements.md), so `Axis` uses an all-to-all on
gloo. In an all-to-all, a rank sends P - 1 messages. In a group of more than `DIRECT_RANKS` ranks, the collectives of
the control plane (all-gathers and small all-reduces that the rank waits for) therefore use recursive doubling, with
log2 P messages. With NCCL, `Axis` uses the native collectives.

These collectives are not differentiable; for differentiable ones see `engine/parallel/autograd_collectives.py`. P is
the number of ranks. On an axis of size 1, no collective communicates.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from engine.collectives.choice import Choice
from engine.collectives.halving import doubling_all_gather, doubling_all_reduce
from engine.collectives.measured import DIRECT, TORCH
from engine.collectives.port import Port
from engine.collectives.tree import tree_reduce
from engine.metering.clocks import Clock, Mark, WallClock
from engine.metering.meter import Meter

# Below this size, latency dominates a gloo all-reduce: one all-to-all with P times the bytes is faster.
SMALL_ALL_REDUCE_BYTES = 1 << 20
DIRECT_RANKS = (
    16  # largest group in which one all-to-all is faster than log2 P messages that depend on one another
)
DOUBLING = "doubling"
BACKGROUND = 1  # tag of the messages of `start_reduce`, which another thread sends and receives


# torch 2.13 has new names for these functions, and warns at each use of the old ones, the only ones of torch 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AsyncCollective:
    """A collective that runs in the background. `wait` meters the collective: its time counts as hidden until it ends
    or `wait` is called, and as exposed in `wait`.

    `wait` calls `finish` when the data has arrived. If `works` is empty, `wait` returns immediately. If `watched` is
    False, as for gloo's sends, whose end is not reported, the collective counts as running until `wait` is called.
    `tensors`: the tensors that the collective reads and writes, which are kept until `wait` (`Clock.end_of`).
    """

    def __init__(
        self,
        axis: "Axis",
        kind: str,
        sent_bytes: int,
        works: Sequence[dist.Work],
        finish: Callable[[], object] = lambda: None,
        watched: bool = True,
        to: Mapping[int, int] | None = None,
        tensors: Sequence[Tensor] = (),
    ):
        self._axis, self._kind, self.sent_bytes, self._to = axis, kind, sent_bytes, to
        self._works, self._finish, self._tensors = works, finish, tensors
        self.in_background = bool(works)
        """Whether the collective runs in the background, so that its result may be incomplete until `wait` returns.
        Collectives that do not run in the background are ordered by the device's stream."""
        self._start = axis.clock.mark()
        self._end: Callable[[], Mark] = lambda: None
        if works and watched:
            self._end = axis.clock.end_of(works[-1], axis)

    def wait(self) -> None:
        if not self._works:
            return
        axis = self._axis
        wait_start = axis.clock.mark()
        with axis.metered(self._kind, self.sent_bytes, self._to):
            for work in self._works:
                work.wait()
            self._finish()
        lane = axis.meter.readings.lanes[axis.name]
        axis.clock.between(self._start, wait_start, lane.add_hidden, or_end=self._end())
        self._works = self._tensors = ()


class _InThread(dist.Work):
    """A blocking collective that runs in a thread of its own."""

    def __init__(self, collective: Callable[[], object]):
        super().__init__()
        self._collective = collective
        self._done: torch.futures.Future[None] = torch.futures.Future()
        # If a peer dies, the thread may never end, and must not keep the process from exiting.
        threading.Thread(target=self._run, name="collective", daemon=True).start()

    def _run(self) -> None:
        try:
            self._collective()
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._done.set_exception(error)  # type: ignore[arg-type] # a Future of None
        else:
            self._done.set_result(None)

    def get_future(self) -> torch.futures.Future[None]:
        return self._done

    def is_completed(self) -> bool:
        return self._done.done()

    def wait(self, timeout: object = None) -> bool:
        self._done.wait()
        return True


class Axis:
    """One mesh axis on this rank: the process group, its size, this rank's index in it, and its collectives."""

    def __init__(self, name: str, group: ProcessGroup | None, meter: Meter):
        self.name = name
        self.group = group
        self.meter = meter
        self.size = group.size() if group else 1
        self.rank = group.rank() if group else 0
        self.peers = dist.get_process_group_ranks(group) if group else []  # global ranks
        # Chooses the algorithms of all-reduces; None: torch's own algorithms.
        self.choice: Choice | None = None
        self._gloo = group is not None and dist.get_backend(group) == "gloo"
        # gloo blocks the host, even if the tensors are on a GPU.
        self.clock: Clock = WallClock() if self._gloo else meter.clock

    def metered(
        self, kind: str, sent_bytes: int, to: Mapping[int, int] | None = None
    ) -> AbstractContextManager[None]:
        return self.meter.collective(self.name, kind, sent_bytes, to, self.clock)

    def port(self, tag: int = 0) -> Port:
        """This rank's connection for point-to-point messages to the ranks of the axis. Messages with different tags may
        be sent by different threads."""
        assert self.group is not None
        return Port.of(self.group, tag)

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack the tensors [...] of all ranks into one tensor [P, ...]."""
        if self.size == 1:
            return x.unsqueeze(0)
        with self.metered("all-gather", (self.size - 1) * x.nbytes):
            if self._gloo and self.size <= DIRECT_RANKS:
                return self.direct_all_gather(x)
            x = x.contiguous()
            out = x.new_empty((self.size, *x.shape))
            if self._gloo:
                out[self.rank] = x
                doubling_all_gather(self.port(), out.view(-1))
            else:
                all_gather_single(out, x, group=self.group)
        return out

    def direct_all_gather(self, x: Tensor) -> Tensor:
        """Stack the tensors [...] of all ranks into one tensor [P, ...]: every rank sends its tensor to every other
        rank in one all-to-all. The bytes are not metered."""
        out = x.new_empty((self.size, *x.shape))
        dist.all_to_all_single(out, x.expand_as(out).contiguous(), group=self.group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum [P, ...] over the ranks and return this rank's row, [...]."""
        if self.size == 1:
            return x[0]
        x = x.contiguous()
        with self.metered("reduce-scatter", x.nbytes // self.size * (self.size - 1)):
            if self._gloo:
                rows = torch.empty_like(x)
                dist.all_to_all_single(rows, x, group=self.group)
                return rows.sum(0)
            out = torch.empty_like(x[0])
            reduce_scatter_single(out.view(-1), x.view(-1), group=self.group)
            return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks; the result is bit-identical on all ranks."""
        if self.size == 1:
            return x
        algorithm = self._all_reduce_algorithm(x)
        if algorithm == DIRECT:
            with self.metered("all-reduce", self._all_reduce_bytes(x)):
                return self.direct_all_reduce(x)
        out = x.clone(memory_format=torch.contiguous_format)
        if algorithm == TORCH:
            with self.metered("all-reduce", self._all_reduce_bytes(x)):
                dist.all_reduce(out, group=self.group)
        else:
            self._sum_by_messages(out)
        return out

    def direct_all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks: every rank sends its whole tensor to every other rank in one all-to-all. The bytes are
        not metered."""
        return self.direct_all_gather(x).sum(0)

    def _all_reduce_algorithm(self, x: Tensor) -> str:
        if self.choice:
            return self.choice.name(x.nbytes)
        if not self._gloo or x.nbytes * self.size > SMALL_ALL_REDUCE_BYTES:
            return TORCH
        return DIRECT if self.size <= DIRECT_RANKS else DOUBLING

    def _all_reduce_bytes(self, x: Tensor) -> int:
        return 2 * x.nbytes * (self.size - 1) // self.size

    def _sum_by_messages(self, x: Tensor) -> int:
        """Sum `x` over the ranks in place, with the fastest measured algorithm for this size or, without measurements,
        with recursive doubling. Return the number of bytes that the meter counts."""
        sent = self.choice.sent_bytes(x) if self.choice else self._all_reduce_bytes(x)
        with self.metered("all-reduce", sent):
            if self.choice:
                self.choice.all_reduce(x)
            else:
                doubling_all_reduce(self.port(), x.view(-1))
        return sent

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int], out: Tensor | None = None) -> Tensor:
        """Send `send[p]` rows of `x` to each rank p. Return the rows received, `receive[p]` from each rank p, in rank
        order."""
        if self.size == 1:
            return x
        if out is None:
            out = x.new_empty((sum(receive), *x.shape[1:]))
        to = self._bytes_to(x, send)
        with self.metered("all-to-all", sum(to.values()), to):
            dist.all_to_all_single(out, x.contiguous(), receive, send, group=self.group)
        return out

    def start_all_to_all(
        self, x: Tensor, send: list[int], receive: list[int]
    ) -> tuple[AsyncCollective, Tensor]:
        """Start `all_to_all` of the contiguous tensor `x`. The returned rows are complete after the wait."""
        out = x.new_empty((sum(receive), *x.shape[1:]))
        to = self._bytes_to(x, send)
        work = dist.all_to_all_single(out, x, receive, send, group=self.group, async_op=True)
        return AsyncCollective(self, "all-to-all", sum(to.values()), (work,), to=to, tensors=(x, out)), out

    def _bytes_to(self, x: Tensor, send: list[int]) -> dict[int, int]:
        """The number of bytes that this rank sends to each other rank in an all-to-all that sends `send[p]` rows of `x`
        to rank p."""
        row = x.nbytes // max(1, x.shape[0])
        me = self.peers[self.rank]
        return {peer: n * row for peer, n in zip(self.peers, send, strict=True) if n and peer != me}

    def exchange(self, x: Tensor) -> Tensor:
        """Send row p of [P, ...] to rank p; row p of the result comes from rank p."""
        if self.size == 1:
            return x
        x = x.contiguous()
        out = torch.empty_like(x)
        with self.metered("exchange", x.nbytes // self.size * (self.size - 1)):
            dist.all_to_all_single(out, x, group=self.group)
        return out

    def send(self, x: Tensor, to: int) -> None:
        """Send `x` to rank `to` of the group, and wait until `x` may be overwritten."""
        with self.metered("send", x.nbytes):
            self._transfer(dist.isend, x.contiguous(), to)

    def receive(self, x: Tensor, source: int) -> None:
        """Receive a tensor from rank `source` of the group into `x`."""
        with self.metered("receive", 0):
            self._transfer(dist.irecv, x, source)

    def _transfer(self, send_or_receive: Callable[..., object], x: Tensor, peer: int) -> None:
        # In a batch, NCCL uses the group's communicator instead of creating one for the pair.
        operation = dist.P2POp(send_or_receive, x, group=self.group, group_peer=peer)
        for work in dist.batch_isend_irecv([operation]):
            work.wait()

    def start_row_exchange(self, x: Tensor, async_op: bool = False) -> tuple[AsyncCollective, Tensor]:
        """Start sending row p of `x` [P, ...] to rank p. After the wait, row p of the returned tensor is the row that
        rank p sent. With NCCL and without `async_op`, the current stream waits for the rows immediately; gloo is
        asynchronous in either case."""
        if self.size == 1:
            return AsyncCollective(self, "exchange", 0, ()), x
        x, sent = x.contiguous(), x.nbytes // self.size * (self.size - 1)
        out = torch.empty_like(x)
        if self._gloo or async_op:
            work = dist.all_to_all_single(out, x, group=self.group, async_op=True)
            return AsyncCollective(self, "exchange", sent, (work,), tensors=(x, out)), out
        with self.metered("exchange", sent):
            dist.all_to_all_single(out, x, group=self.group)
        return AsyncCollective(self, "exchange", sent, ()), out

    def start_broadcast(self, x: Tensor, root: int) -> AsyncCollective:
        """Start broadcasting `x` from rank `root` of the group into the `x` of every rank."""
        if self.size == 1:
            return AsyncCollective(self, "broadcast", 0, ())
        work = dist.broadcast(x, group_src=root, group=self.group, async_op=True)
        return AsyncCollective(self, "broadcast", x.nbytes if self.rank == root else 0, (work,))

    def start_reduce(self, x: Tensor, combine: Callable[[Tensor, Tensor], object]) -> AsyncCollective:
        """Start reducing the `x` of all ranks to rank 0 of the group, along a binomial tree in another thread
        (`tree_reduce`). After the wait, `x` is the result on rank 0, and a partial result on the other ranks. Wait for
        it before starting the next one."""
        if self.size == 1:
            return AsyncCollective(self, "reduce", 0, ())
        work = _InThread(partial(tree_reduce, self.port(BACKGROUND), x, combine))
        return AsyncCollective(self, "reduce", x.nbytes if self.rank else 0, (work,))

    def start_ring(self, x: Tensor) -> tuple[AsyncCollective, Tensor]:
        """Start sending `x` to the next rank of the ring. After the wait, the returned tensor contains the previous
        rank's `x`."""
        if self.size == 1:
            return AsyncCollective(self, "ring", 0, ()), x
        x = x.contiguous()
        received = torch.empty_like(x)
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=to),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=source),
        ]
        works = dist.batch_isend_irecv(operations)
        started = AsyncCollective(
            self, "ring", x.nbytes, works, watched=not self._gloo, tensors=(x, received)
        )
        return started, received

    def start_all_gather(self, out: Tensor, x: Tensor, async_op: bool = False) -> AsyncCollective:
        """Start gathering the `x` [n] of every rank into `out` [P n]. `out` is complete after the wait. With NCCL and
        without `async_op`, the current stream waits for `out` immediately; gloo is asynchronous in either case."""
        sent = (self.size - 1) * x.nbytes
        if self._gloo:
            copies = x.expand(self.size, -1).contiguous()
            work = dist.all_to_all_single(out.view(self.size, -1), copies, group=self.group, async_op=True)
            return AsyncCollective(self, "all-gather", sent, (work,))
        if async_op:
            work = all_gather_single(out, x, group=self.group, async_op=True)
            return AsyncCollective(self, "all-gather", sent, (work,), tensors=(x, out))
        with self.metered("all-gather", sent):
            all_gather_single(out, x, group=self.group)
        return AsyncCollective(self, "all-gather", sent, ())

    def start_reduce_scatter(self, out: Tensor, x: Tensor, async_op: bool = False) -> AsyncCollective:
        """Start a reduce-scatter, which sums `x` [P n] over the ranks and writes this rank's part of the sum to `out`
        [n]. `out` is complete after the wait. With NCCL and without `async_op`, the current stream waits for `out`
        immediately; gloo is asynchronous in either case."""
        sent = x.nbytes // self.size * (self.size - 1)
        if self._gloo:
            rows = torch.empty_like(x).view(self.size, -1)
            work = dist.all_to_all_single(rows, x.view(self.size, -1), group=self.group, async_op=True)
            return AsyncCollective(self, "reduce-scatter", sent, (work,), lambda: torch.sum(rows, 0, out=out))
        if async_op:
            work = reduce_scatter_single(out, x, group=self.group, async_op=True)
            return AsyncCollective(self, "reduce-scatter", sent, (work,), tensors=(x, out))
        with self.metered("reduce-scatter", sent):
            reduce_scatter_single(out, x, group=self.group)
        return AsyncCollective(self, "reduce-scatter", sent, ())

    def start_all_reduce(self, x: Tensor) -> AsyncCollective:
        """Start summing `x` [n] over the ranks in place. The sum is complete after the wait and bit-identical on all
        ranks."""
        sent, algorithm = self._all_reduce_bytes(x), self._all_reduce_algorithm(x)
        if algorithm not in (TORCH, DIRECT):
            # Its messages depend on one another, so nothing runs in the background.
            return AsyncCollective(self, "all-reduce", self._sum_by_messages(x), ())
        if not self._gloo:
            with self.metered("all-reduce", sent):
                dist.all_reduce(x, group=self.group)
            return AsyncCollective(self, "all-reduce", sent, ())
        if algorithm == TORCH:
            work = dist.all_reduce(x, group=self.group, async_op=True)
            return AsyncCollective(self, "all-reduce", sent, (work,))
        rows = x.new_empty(self.size, x.numel())
        copies = x.expand(self.size, -1).contiguous()
        work = dist.all_to_all_single(rows, copies, group=self.group, async_op=True)
        return AsyncCollective(self, "all-reduce", sent, (work,), lambda: torch.sum(rows, 0, out=x))

    def start_exchange(self, x: Tensor, peers: list[int]) -> tuple[AsyncCollective, list[Tensor]]:
        """Start exchanging `x` among `peers` (global ranks, including this one). After the wait, the returned list
        contains the `x` of each peer, in the order of `peers`."""
        me = self.peers[self.rank]
        rows = [x if peer == me else torch.empty_like(x) for peer in peers]
        works = [
            work
            for peer, row in zip(peers, rows, strict=True)
            if peer != me
            for work in (dist.isend(x, peer, self.group), dist.irecv(row, peer, self.group))
            if work is not None
        ]
        return AsyncCollective(self, "exchange", (len(peers) - 1) * x.nbytes, works, watched=False), rows
