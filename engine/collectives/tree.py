"""Naive collectives through rank 0, and the binomial tree.

Naive: rank 0 receives from one rank after the other and adds the buffers in rank order, ((x[0] + x[1]) + x[2]) + ....
Rank 0 then sends the sum to one rank after the other. The whole all-reduce takes 2 (P-1) steps, and 2 (P-1) n bytes
pass through rank 0.

Tree (Chan et al. 2007, minimum-spanning-tree broadcast and reduce): in the step with distance d = 1, 2, 4, ..., each
rank a + d, where a is a multiple of 2d, sends its sum to rank a. The result is sent back along the same edges of the
tree. The whole all-reduce takes 2 ceil(log2 P) steps of n bytes. The sum over ranks [a, a + 2d) is the sum over [a, a +
d) plus the sum over [a + d, a + 2d). A reduction to rank 0 (`tree_reduce`) is the first half: rank 0 receives ceil(log2
P) messages, and every other rank sends one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.collectives.parts import children
from engine.collectives.port import Port
from engine.collectives.ring import split


def _gather_sum(port: Port, x: Tensor) -> None:
    if port.rank:
        port.exchange([(0, x)])
        return
    received = torch.empty_like(x)
    for peer in range(1, port.size):
        port.add_from(peer, x, received)


def _send_whole(port: Port, x: Tensor) -> None:
    if port.rank:
        port.exchange([], [(0, x)])
        return
    for peer in range(1, port.size):
        port.exchange([(peer, x)])


def naive_all_reduce(port: Port, x: Tensor) -> None:
    _gather_sum(port, x)
    _send_whole(port, x)


def naive_reduce_scatter(port: Port, x: Tensor) -> None:
    _gather_sum(port, x)
    parts = split(x, port.size)
    if port.rank:
        port.exchange([], [(0, parts[port.rank])])
        return
    for peer in range(1, port.size):
        port.exchange([(peer, parts[peer])])


def naive_all_gather(port: Port, x: Tensor) -> None:
    parts = split(x, port.size)
    if port.rank:
        port.exchange([(0, parts[port.rank])])
    else:
        for peer in range(1, port.size):
            port.exchange([], [(peer, parts[peer])])
    _send_whole(port, x)


def _parent(rank: int) -> int:
    return rank & (rank - 1)  # the number without its lowest set bit


def tree_reduce(port: Port, x: Tensor, combine: Callable[[Tensor, Tensor], object] = Tensor.add_) -> None:
    """Reduce the ranks' buffers to rank 0. `combine(x, other)` adds another rank's buffer to `x`, in place; it must be
    associative. Afterwards `x` is complete on rank 0, and a partial result on the other ranks."""
    received = torch.empty_like(x)
    for child in children(port.rank, port.size):
        port.exchange([], [(child, received)])
        combine(x, received)
    if port.rank:
        port.exchange([(_parent(port.rank), x)])


def tree_all_reduce(port: Port, x: Tensor) -> None:
    tree_reduce(port, x)
    if port.rank:
        port.exchange([], [(_parent(port.rank), x)])
    for child in reversed(children(port.rank, port.size)):
        port.exchange([(child, x)])
