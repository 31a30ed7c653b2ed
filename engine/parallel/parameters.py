"""Creates model parameters: the initial values do not depend on the layout, and each rank keeps its shard of them."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from engine.device import CPU
from engine.kernels.compiled import Compiler
from engine.parallel.collectives import Axis
from engine.parallel.context_parallel import ContextParallel
from engine.parallel.sequence_split import SequenceSlices


def initial_values(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    """Normally distributed values that depend on the parameter's name and the seed, but not on the layout."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return (torch.randn(shape, generator=generator, dtype=torch.float32) * std).to(torch.get_default_dtype())


class ParameterFactory:
    """Creates parameters: each rank keeps its shard of the tensor that a run with one process would have.

    A sharded parameter is a DTensor on the mesh of its axis, so that FSDP, clipping and checkpoints know the full
    shape. On an axis of size 1 it is a plain tensor.
    """

    def __init__(
        self,
        seed: int,
        tp: Axis,
        ep: Axis,
        tp_mesh: DeviceMesh | None = None,
        ep_mesh: DeviceMesh | None = None,
        ep_hops: Sequence[Axis] | None = None,  # axes of the all-to-alls of token rows; default: only ep
        context: ContextParallel | None = None,  # default: no cp
        device: torch.device = CPU,
        compiled: Compiler | None = None,  # compiles functions of the modules; default: no compilation
    ):
        self.seed, self.tp, self.ep, self.device = seed, tp, ep, device
        self.ep_hops = ([ep] if ep.size > 1 else []) if ep_hops is None else ep_hops
        self.context = context or ContextParallel.whole(tp)
        self.slices = SequenceSlices(self.context.sequence, self.context.cp.size)
        self.compiled = compiled or Compiler()
        self._tp_mesh, self._ep_mesh = tp_mesh, ep_mesh

    def replicated(self, name: str, shape: tuple[int, ...], std: float) -> nn.Parameter:
        """A parameter that all tp ranks have. Each tp rank processes a slice of the sequence, so the gradient must be
        summed over tp."""
        return nn.Parameter(initial_values(name, shape, std, self.seed).to(self.device))

    def ones(self, shape: tuple[int, ...]) -> nn.Parameter:
        return nn.Parameter(torch.ones(shape, device=self.device))

    def zeros(self, shape: tuple[int, ...], dim: int | None = None) -> nn.Parameter:
        """A bias: split over tp along `dim`, or on all tp ranks."""
        if dim is None:
            return nn.Parameter(torch.zeros(shape, device=self.device))
        part = torch.zeros(shape, device=self.device).chunk(self.tp.size, dim)[self.tp.rank].contiguous()
        return nn.Parameter(_on_mesh(part, self._tp_mesh, dim))

    def sharded(self, name: str, shape: tuple[int, ...], std: float, dim: int) -> nn.Parameter:
        """A parameter split over tp along `dim`: 0 for column-parallel weights [out, in], 1 for row-parallel ones."""
        part = initial_values(name, shape, std, self.seed).chunk(self.tp.size, dim)[self.tp.rank].contiguous()
        return nn.Parameter(_on_mesh(part.to(self.device), self._tp_mesh, dim))

    def experts(self, name: str, count: int, shape: tuple[int, ...], std: float) -> nn.Parameter:
        """The whole weights of this rank's experts, stacked: [count / ep, *shape]."""
        local = count // self.ep.size
        first = self.ep.rank * local
        stack = [initial_values(f"{name}.{e}", shape, std, self.seed) for e in range(first, first + local)]
        return nn.Parameter(_on_mesh(torch.stack(stack).to(self.device), self._ep_mesh, 0))


def _on_mesh(part: Tensor, mesh: DeviceMesh | None, dim: int) -> Tensor:
    if mesh is None or mesh.size() == 1:
        return part
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
