"""The ranks of a run as torch meshes and metered axes: the dense and the expert view of the same ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.config.grid import Grid
from engine.device import CPU
from engine.metering.meter import Meter
from engine.parallel.collectives import Axis


class World:
    """Groups and meshes of one rank. Needs an initialised default process group of `grid.world` ranks.

    With `ep_inner`, rows of experts travel the ep axis in two hops: within groups of so many ranks, then across. With
    `ends`, the first and the last rank of each pipeline have an axis of their own.
    """

    def __init__(
        self,
        grid: Grid,
        meter: Meter,
        device: torch.device = CPU,
        ep_inner: int | None = None,
        ends: bool = False,
    ):
        self.grid, self.device = grid, device
        self.rank = dist.get_rank()
        self.at = grid.coords(self.rank)
        self.dense = _mesh(device, grid.dense)
        self.expert = _mesh(device, grid.expert)
        self.pp = Axis("pp", _group(self.dense, "pp"), meter)
        pairs = [[ranks[0], ranks[-1]] for ranks in grid.groups("pp")]
        self.ends = Axis("pp", _mine(pairs) if ends else None, meter)  # on the ranks between, of size 1
        self.dp = Axis("dp", _group(self.dense, "fsdp"), meter)
        self.replicas = Axis("dp", _group(self.dense, "dp_replicate"), meter)
        self.tp = Axis("tp", _group(self.dense, "tp"), meter)
        self.cp = Axis("cp", _beside(grid, "cp"), meter)
        # All ranks that share a sequence. What a router gathers over both cuts at once is metered as cp.
        self.sequence = self.cp if grid.cp > 1 else self.tp
        if grid.cp > 1 and grid.tp > 1:
            self.sequence = Axis("cp", _beside(grid, "cp", "tp"), meter)
        self.ep = Axis("ep", _group(self.expert, "ep"), meter)
        self.expert_ranks = self.ep  # all that hold a part of one copy of a stage's experts
        if grid.ep > 1 and grid.efsdp > 1:
            self.expert_ranks = Axis("ep", _beside(grid, "dp_shard", "cp", "tp"), meter)
        self.ep_hops = [self.ep] if grid.ep > 1 else []
        if ep_inner is not None:
            shape = {"outside": grid.world // grid.ep, "across": grid.ep // ep_inner, "within": ep_inner}
            levels = _mesh(device, shape)
            self.ep_hops = [Axis("ep", _group(levels, level), meter) for level in ("within", "across")]
        self.edp = Axis("dp", _group(self.expert, "efsdp"), meter)
        # A group of its own, of the hosts: the agreement on knobs and the statistics run beside the step's collectives.
        self.control = Axis("control", dist.new_group(backend="gloo"), meter)


def _mesh(device: torch.device, shape: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def _group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup | None:
    return mesh.get_group(axis) if mesh[axis].size() > 1 else None


def _beside(grid: Grid, *axes: str) -> dist.ProcessGroup | None:
    """Of the ranks that differ along `axes` alone: cp is a part of the meshes' fsdp dimension."""
    groups = grid.groups(*axes)
    return _mine(groups) if len(groups[0]) > 1 else None


def _mine(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """The group of this rank, None where it is in none; the same call on every rank."""
    mine: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(groups)[0]  # type: ignore[no-untyped-call]
    return mine
