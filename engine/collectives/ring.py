"""Ring algorithms: one ring over all ranks, or rings inside the nodes and between the nodes (hierarchical).

Ring (Patarasu and Yuan 2009, section 3): in each of P - 1 steps a rank sends one part of the buffer to the next rank
and receives one from the previous rank. In a reduce-scatter it adds the received part to its own, so the sum of part c
starts at rank c + 1, passes through the other ranks in ring order, and is complete at rank c. An all-gather passes the
reduced parts around the ring. An all-reduce is a reduce-scatter and an all-gather, with 2 (P-1) steps and 2 (P-1)/P n
bytes.

Hierarchical, for P = N r ranks on N nodes: an all-reduce is a ring reduce-scatter inside each node, a ring all-reduce
of each part between the nodes, and a ring all-gather inside each node. So each all-reduce between nodes has a buffer of
only n/r elements.
"""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from engine.collectives.parts import edges
from engine.collectives.port import Port


def split(x: Tensor, parts: int) -> list[Tensor]:
    """Split the buffer `x` [n] into parts, which are views."""
    return [x[first:after] for first, after in pairwise(edges(x.numel(), parts))]


def like(parts: list[Tensor], x: Tensor) -> list[Tensor]:
    """Views of `x` with the sizes of `parts`."""
    ends = list(accumulate(len(part) for part in parts))
    return [x[end - len(part) : end] for end, part in zip(ends, parts, strict=True)]


def pass_and_add(port: Port, parts: list[Tensor]) -> None:
    """Ring reduce-scatter: afterwards part `port.rank` is the sum over all ranks, and the other parts are partial
    sums."""
    received = torch.empty_like(max(parts, key=len))
    ahead, behind = (port.rank + 1) % port.size, (port.rank - 1) % port.size
    for step in range(1, port.size):
        sent, mine = parts[(port.rank - step) % port.size], parts[(port.rank - step - 1) % port.size]
        buffer = received[: len(mine)]
        port.exchange([(ahead, sent)], [(behind, buffer)])
        mine.add_(buffer)


def pass_on(port: Port, parts: list[Tensor]) -> None:
    """Ring all-gather: before the call, `parts` contains only this rank's part; after the call, it contains every
    rank's part."""
    ahead, behind = (port.rank + 1) % port.size, (port.rank - 1) % port.size
    for step in range(port.size - 1):
        sent, mine = parts[(port.rank - step) % port.size], parts[(port.rank - step - 1) % port.size]
        port.exchange([(ahead, sent)], [(behind, mine)])


def reduce_scatter(port: Port, x: Tensor) -> None:
    pass_and_add(port, split(x, port.size))


def all_gather(port: Port, x: Tensor) -> None:
    pass_on(port, split(x, port.size))


def all_reduce(port: Port, x: Tensor) -> None:
    parts = split(x, port.size)
    pass_and_add(port, parts)
    pass_on(port, parts)


class Levels:
    """Two `Port` objects: one to the ranks of this node, and one to the ranks that have this rank's local index on the
    other nodes. `node`: ranks per node, a divisor of the number of ranks."""

    def __init__(self, port: Port, node: int):
        self.node, self.nodes = node, port.size // node
        first = port.rank - port.rank % node
        self.inside = port.among(range(first, first + node))
        self.between = port.among(range(port.rank % node, port.size, node))

    def by_index(self, x: Tensor) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Split the buffer `x` into one part per rank, and group the parts of ranks that have the same local index.
        Returns the groups twice: as lists of views, and as contiguous copies."""
        parts = split(x, self.node * self.nodes)
        found = [parts[index :: self.node] for index in range(self.node)]
        return found, [torch.cat(one) for one in found]


def hierarchical_all_reduce(port: Port, x: Tensor, node: int) -> None:
    levels = Levels(port, node)
    parts = split(x, node)
    pass_and_add(levels.inside, parts)
    all_reduce(levels.between, parts[levels.inside.rank])
    pass_on(levels.inside, parts)


def hierarchical_reduce_scatter(port: Port, x: Tensor, node: int) -> None:
    """Reduce inside each node first, so that fewer bytes are sent between nodes. The parts are first copied, so that
    the parts of all ranks with the same local index, which are then reduced between the nodes, are contiguous."""
    levels = Levels(port, node)
    views, copies = levels.by_index(x)
    pass_and_add(levels.inside, copies)
    mine = like(views[levels.inside.rank], copies[levels.inside.rank])
    pass_and_add(levels.between, mine)
    views[levels.inside.rank][levels.between.rank].copy_(mine[levels.between.rank])


def hierarchical_all_gather(port: Port, x: Tensor, node: int) -> None:
    """Gather between the nodes first, then inside each node: the reverse of the reduce-scatter."""
    levels = Levels(port, node)
    views, copies = levels.by_index(x)
    mine = like(views[levels.inside.rank], copies[levels.inside.rank])
    pass_on(levels.between, mine)
    pass_on(levels.inside, copies)
    for parts, copy in zip(views, copies, strict=True):
        for part, new in zip(parts, like(parts, copy), strict=True):
            part.copy_(new)
