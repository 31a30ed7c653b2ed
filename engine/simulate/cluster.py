"""The ranks of a simulated cluster as arrays: coordinates, nodes, and groups that synchronise in every layer."""

from functools import cached_property
from math import lcm

import numpy as np
from numpy.typing import NDArray

from engine.config.grid import ORDER
from engine.config.layout import Layout

Ranks = NDArray[np.int64]
"""[rank]"""


class Cluster:
    """Ranks of one layout on nodes of `ranks_per_node` ranks.

    Ranks with the same pp coordinate that exchange data in every layer (over tp, cp or ep) form a *block*: all ranks of
    a block take the time of its slowest rank. Blocks with the same pp coordinate wait for each other at the end of the
    step. `block`: for each rank, the index of its block among the blocks with the same pp coordinate. A pipeline
    consists of one block for each pp coordinate, all with the same index.
    """

    def __init__(self, layout: Layout, ranks_per_node: int):
        self.grid = grid = layout.ranks
        self.world, self.ranks_per_node = grid.world, ranks_per_node
        ranks = np.arange(self.world)
        at = dict(zip(ORDER, np.unravel_index(ranks, [getattr(grid, axis) for axis in ORDER]), strict=True))
        self.pp: Ranks = at["pp"]
        within = (at["dp_shard"] * grid.cp + at["cp"]) * grid.tp + at["tp"]
        self.ep: Ranks = within % grid.ep
        of_stage = grid.fsdp * grid.tp
        size = lcm(grid.ep, grid.tp * grid.cp)
        size = size if of_stage % size == 0 else of_stage
        self.blocks = grid.dp_replicate * of_stage // size
        self.block: Ranks = at["dp_replicate"] * (of_stage // size) + within // size
        self.node: Ranks = ranks // ranks_per_node
        self.ranks_of_stage = grid.dp_replicate * of_stage
        self.senders = ranks[(within == 0) & (at["dp_replicate"] == 0)]
        """The ranks that send timelines: one rank for each pipeline coordinate, in order."""

    @property
    def nodes(self) -> int:
        return -(-self.world // self.ranks_per_node)

    def slowest(self, factor: NDArray[np.float64]) -> NDArray[np.float64]:
        """The largest factor of any rank in each block. `factor` is [rank], the result is [pipeline rank, block]."""
        most = np.zeros((self.grid.pp, self.blocks))
        np.maximum.at(most, (self.pp, self.block), factor)
        return most

    def of_ranks(self, by_block: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert values per block, [pipeline rank, block], to values per rank, [rank]."""
        found: NDArray[np.float64] = by_block[self.pp, self.block]
        return found

    def host(self, rank: int) -> str:
        return f"node{rank // self.ranks_per_node:0{len(str(self.nodes - 1))}}"

    @cached_property
    def ep_groups(self) -> NDArray[np.int64]:
        """[rank, ep rank]: the global ranks of the members of each rank's ep group."""
        first = np.arange(self.world) - self.ep
        found: NDArray[np.int64] = first[:, None] + np.arange(self.grid.ep)
        return found
