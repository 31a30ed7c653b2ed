"""Creates model parameters: each rank keeps its shard of the tensor that a single-process run would have."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from engine.device import CPU
from engine.kernels.compiled import Compiler
from engine.kernels.grouped import Product, grouped
from engine.parallel.collectives import Axis
from engine.parallel.context.context_parallel import ContextParallel
from engine.parallel.context.sequence_split import SequenceSlices
from engine.parallel.initial_values import Constant, InitialValues, Normal, Stacked
from engine.parallel.local_shards import local_shard

META = torch.device("meta")


class ParameterFactory:
    """Creates parameters: each rank keeps its shard of the tensor that a single-process run would have.

    A sharded parameter is a DTensor on the mesh of its axis, so that FSDP, gradient clipping and checkpoints see the
    full shape. On an axis of size 1, a parameter is a plain tensor.

    If `deferred` is True, parameters are created on the meta device, where they take no memory, and `unfilled` maps
    each parameter to its initial values: `engine/sharding/filling.py` allocates and fills them after FSDP has sharded
    them.
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
        deferred: bool = False,
        grouped: Product = grouped,  # the products of the experts
    ):
        self.seed, self.tp, self.ep, self.device = seed, tp, ep, device
        self.ep_hops = ([ep] if ep.size > 1 else []) if ep_hops is None else ep_hops
        self.context = context or ContextParallel.whole(tp)
        self.slices = SequenceSlices(self.context.sequence, self.context.cp.size)
        self.compiled, self.grouped = compiled or Compiler(), grouped
        self._tp_mesh, self._ep_mesh = tp_mesh, ep_mesh
        self._born_on = META if deferred else device
        self._deferred = deferred
        self.unfilled: dict[nn.Parameter, InitialValues] = {}
        self._made: set[nn.Parameter] = set()

    def replicated(self, name: str, shape: tuple[int, ...], std: float) -> nn.Parameter:
        """A parameter that is replicated over tp. Each tp rank processes a slice of the sequence, so the gradient must
        be summed over tp."""
        return self._new(shape, Normal(name, shape, std, self.seed))

    def ones(self, shape: tuple[int, ...]) -> nn.Parameter:
        return self._new(shape, Constant(1.0))

    def zeros(self, shape: tuple[int, ...], dim: int | None = None) -> nn.Parameter:
        """A bias with initial value 0: split over tp along `dim`, or replicated over tp if `dim` is None."""
        if dim is None:
            return self._new(shape, Constant(0.0))
        part = torch.empty(shape, device=META).chunk(self.tp.size, dim)[self.tp.rank].shape
        return self._new(part, Constant(0.0), self._tp_mesh, dim)

    def sharded(self, name: str, shape: tuple[int, ...], std: float, dim: int) -> nn.Parameter:
        """A parameter split over tp along `dim`: 0 for column-parallel weights [out, in], 1 for row-parallel ones."""
        part = torch.empty(shape, device=META).chunk(self.tp.size, dim)[self.tp.rank].shape
        first = self.tp.rank * part[dim]
        if dim == 0:
            initial = Normal(name, shape, std, self.seed, row=first)
        else:
            initial = Normal(name, shape, std, self.seed, columns=(first, first + part[dim]))
        return self._new(part, initial, self._tp_mesh, dim)

    def experts(self, name: str, count: int, shape: tuple[int, ...], std: float) -> nn.Parameter:
        """The weights of this ep rank's experts, stacked: [count / ep, *shape]. Each expert is whole: tp does not split
        it."""
        local = count // self.ep.size
        first = self.ep.rank * local
        stack = tuple(Normal(f"{name}.{e}", shape, std, self.seed) for e in range(first, first + local))
        return self._new((local, *shape), Stacked(stack), self._ep_mesh)

    def adopt(self, module: nn.Module, name: str, std_of: Callable[[str, torch.Size], float]) -> None:
        """Replace those parameters of `module` that were not created by this factory. `name` is the module's name in
        the model.

        The new parameters have the same shapes and are replicated over tp. `std_of(name, shape)` is the standard
        deviation of a parameter's initial values. If the standard deviation is 0, a vector whose name ends in `weight`
        (the scale of a norm) starts at 1 and any other parameter at 0. A parameter that two modules share stays shared.
        """
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for prefix, owner in module.named_modules(prefix=name):
            for key, old in list(owner.named_parameters(recurse=False)):
                if old in self._made:
                    continue
                if old not in replaced:
                    full = f"{prefix}.{key}"
                    std = std_of(full, old.shape)
                    initial: InitialValues = Normal(full, tuple(old.shape), std, self.seed)
                    if std == 0:
                        initial = Constant(float(old.ndim == 1 and key == "weight"))
                    replaced[old] = self._new(old.shape, initial)
                setattr(owner, key, replaced[old])

    def _new(
        self, shape: Sequence[int], initial: InitialValues, mesh: DeviceMesh | None = None, dim: int = 0
    ) -> nn.Parameter:
        part = torch.empty(tuple(shape), device=self._born_on)
        parameter = nn.Parameter(_on_mesh(part, mesh, dim))
        self._made.add(parameter)
        if self._deferred:
            self.unfilled[parameter] = initial
        else:
            initial.fill(local_shard(parameter.detach()), 0)
        return parameter


def _on_mesh(part: Tensor, mesh: DeviceMesh | None, dim: int) -> Tensor:
    if mesh is None or mesh.size() == 1:
        return part
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
