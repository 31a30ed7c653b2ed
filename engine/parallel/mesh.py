"""The two device meshes of a run (one for dense and one for expert parameters, over the same ranks), and the mesh axes,
each with the meter that counts its traffic."""

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.collectives.choice import Choice
from engine.collectives.measured import chosen_all_reduces
from engine.config.grid import Grid
from engine.device import CPU
from engine.metering.meter import Meter
from engine.parallel.collectives import Axis
from engine.planner.hardware.description import MeasuredCollective


class World:
    """The process groups and device meshes of one rank. The default process group must be initialised and have
    `grid.world` ranks.

    If `ep_inner` is given, token rows cross the ep axis in two hops: within groups of `ep_inner` ranks, then between
    groups. If `ends` is True, an additional process group connects the first and the last rank of each pipeline.
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
        self.coords = grid.coords(self.rank)
        self.dense = _mesh(device, grid.dense)
        self.expert = _mesh(device, grid.expert)
        self.pp = Axis("pp", _group(self.dense, "pp"), meter)
        pairs = [[ranks[0], ranks[-1]] for ranks in grid.groups("pp")]
        # The axis has size 1 on the ranks between the two ends.
        self.ends = Axis("pp", _own_group(pairs) if ends else None, meter)
        self.dp = Axis("dp", _group(self.dense, "fsdp"), meter)
        self.replicas = Axis("dp", _group(self.dense, "dp_replicate"), meter)
        self.tp = Axis("tp", _group(self.dense, "tp"), meter)
        self.cp = Axis("cp", _group_along(grid, "cp"), meter)
        # All ranks that share a sequence. If a router gathers over cp and tp together, the meter counts this as cp.
        self.sequence = self.cp if grid.cp > 1 else self.tp
        if grid.cp > 1 and grid.tp > 1:
            self.sequence = Axis("cp", _group_along(grid, "cp", "tp"), meter)
        self.ep = Axis("ep", _group(self.expert, "ep"), meter)
        self.expert_ranks = self.ep  # all ranks that together hold one copy of the experts of a stage
        if grid.ep > 1 and grid.efsdp > 1:
            self.expert_ranks = Axis("ep", _group_along(grid, "dp_shard", "cp", "tp"), meter)
        self.ep_hops = [self.ep] if grid.ep > 1 else []
        if ep_inner is not None:
            shape = {"outside": grid.world // grid.ep, "across": grid.ep // ep_inner, "within": ep_inner}
            levels = _mesh(device, shape)
            self.ep_hops = [Axis("ep", _group(levels, level), meter) for level in ("within", "across")]
        self.edp = Axis("dp", _group(self.expert, "efsdp"), meter)
        # A separate gloo group, because the vote on knobs and the statistics overlap with the collectives of
        # the step.
        self.control = Axis("control", dist.new_group(backend="gloo"), meter)
        # All ranks, over the device's back end: for sums that the step waits for, such as the gradient norm.
        self.all_ranks = Axis("control", dist.group.WORLD, meter)

    def use_measured_all_reduces(self, path: str) -> None:
        """From now on, use the algorithms that rank 0's hardware file selects for the all-reduces of all axes except
        `control`, the groups of all ranks for votes, statistics and the gradient norm. All ranks must call this. Rank 0
        raises RefusedError if it cannot use the file."""
        shared: list[bytes | None] = [None]
        if self.rank == 0:
            shared = [msgspec.json.encode(chosen_all_reduces(path, dist.get_backend()))]
        dist.broadcast_object_list(shared, group=self.control.group, group_src=0)
        rows = msgspec.json.decode(shared[0] or b"", type=tuple[MeasuredCollective, ...])
        for axis in self._axes:
            if axis.group is not None and axis.name != self.control.name:
                axis.choice = Choice(rows, axis.group)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of this rank's axes."""
        return [axis.group for axis in self._axes if axis.group is not None]

    @property
    def _axes(self) -> list[Axis]:
        return [*(axis for axis in vars(self).values() if isinstance(axis, Axis)), *self.ep_hops]


def _mesh(device: torch.device, shape: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def _group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup | None:
    return mesh.get_group(axis) if mesh[axis].size() > 1 else None


def _group_along(grid: Grid, *axes: str) -> dist.ProcessGroup | None:
    """The process group of the ranks that have this rank's coordinates on all axes other than `axes`. The group is not
    taken from a device mesh, because the meshes have no cp axis: their axis fsdp covers dp_shard and cp."""
    groups = grid.groups(*axes)
    return _own_group(groups) if len(groups[0]) > 1 else None


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """The group that contains this rank, or None. Every rank must make the same call, because creating groups is
    collective."""
    group: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(groups)[0]  # type: ignore[no-untyped-call]
    return group
