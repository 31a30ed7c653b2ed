"""Naive collectives with one root, and the binomial tree.

Naive: rank 0 receives from one rank after the other and adds in order of rank, ((x[0] + x[1]) + x[2]) + ..., then sends
to one rank after the other: 2 (P-1) steps, and 2 (P-1) n bytes through rank 0.

Tree (Chan et al. 2007, minimum-spanning-tree broadcast and reduce): the ranks at distance 1, 2, 4, ... from a multiple
of twice that distance send their sums to it, and the result goes back the same way: 2 ceil(log2 P) steps of n bytes.
The sum of ranks [a, a + 2d) is that of [a, a + d) plus that of [a + d, a + 2d).
"""

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


def tree_all_reduce(port: Port, x: Tensor) -> None:
    below = children(port.rank, port.size)
    parent = port.rank & (port.rank - 1)  # the number without its lowest set bit
    received = torch.empty_like(x)
    for child in below:
        port.add_from(child, x, received)
    if port.rank:
        port.exchange([(parent, x)])
        port.exchange([], [(parent, x)])
    for child in reversed(below):
        port.exchange([(child, x)])
