"""The data axis: parameters, gradients and optimizer state sharded by FSDP2, its traffic through the metered door.

Gradients are reduced as sums; the loss was divided once, by the global count of valid tokens. Experts are sharded on
the expert mesh, everything else on the dense one. Replicas (HSDP) hold the same shards of the same numbers: what a
replica's ranks have reduced among themselves is summed over the replicas once a step. A rank's place within its replica
is the same in the dense and in the expert view, so one axis serves both.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engine.model.head import Head
from engine.model.moe import Experts
from engine.model.transformer import Block, Stage
from engine.parallel.collectives import Axis
from engine.parallel.local_shards import local_shard
from engine.parallel.mesh import World
from engine.sharding.fsdp_probe import probe
from engine.sharding.gradient_reductions import FsdpUnit, GradientReductions

EMBEDDING = "embedding.weight"

# Each rank keeps and updates its shard in fp32; what is gathered and computed with is rounded from it.
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
}


class Shards:
    """All stages of a rank, sharded in place: experts on the expert mesh, all else on the dense one.

    With `by_block`, each block, its experts and the head are units of their own, so that their traffic hides behind the
    other units' computation and ZeRO 3 has something to let go of; the embedding, the last norm and a head that
    shares the embedding's weight are the stage's own unit. Otherwise (a pipeline reduces once a step, with nothing left
    to hide behind) a stage is one unit and its experts another: the fewer the quicker. The stage is sharded on a mesh
    of size 1 too, or torch's pipelining would not reduce its gradients. Only a rank that shares its parameters with
    nobody and has no pipeline keeps them as they are: a tenth of a small step.

    What the ZeRO stage changes is only when a unit is gathered and reduced, so it can change between two steps:
    0 and 1 gather once a step and reduce once; 2 gathers once and, without a pipeline, reduces each micro-batch; 3
    gathers again at each use.
    """

    def __init__(
        self, stages: Sequence[Stage], world: World, zero: int, by_block: bool, precision: str = "fp32"
    ):
        self._stages, self._world = stages, world
        self._policy = POLICIES[precision]
        self._reductions = GradientReductions(world.replicas)
        self._roots: list[FSDPModule] = []
        self._units: list[FsdpUnit] = []
        alone = world.pp.size == world.dp.size == world.edp.size == world.replicas.size == 1
        plain = alone and precision == "fp32"
        if not plain:
            probe(world.dense["fsdp"], world.dp, world.replicas, self._policy, world.device)
        for stage in () if plain else stages:
            experts: list[nn.Module] = [module for module in stage.modules() if isinstance(module, Experts)]
            for unit in [[module] for module in experts] if by_block else [experts] if experts else []:
                self._shard(unit, "efsdp", world.edp)
            for module in stage.modules() if by_block else ():
                if isinstance(module, Block) or (isinstance(module, Head) and not stage.tied):
                    self._shard([module], "fsdp", world.dp)
            self._roots.append(self._shard([stage], "fsdp", world.dp))
        # As they are sharded: between forward and backward a stage's own list is of gathered ones.
        self._parameters = [parameter for _, parameter in named_parameters(stages)]
        self._embeddings = [parameter for name, parameter in named_parameters(stages) if name == EMBEDDING]
        self.use_zero(zero)

    def _shard(self, modules: list[nn.Module], axis_name: str, axis: Axis) -> FSDPModule:
        mesh = self._world.dense if axis_name == "fsdp" else self._world.expert
        sharded = fully_shard(
            modules, mesh=mesh[axis_name], reshard_after_forward=False, mp_policy=self._policy
        )[0]
        assert isinstance(sharded, FSDPModule)
        self._units.append(FsdpUnit(sharded, axis, self._reductions))
        return sharded

    def use_zero(self, zero: int) -> None:
        """From the next step on. A stage's own unit is needed from its first to its last operation, so it stays."""
        self.zero = zero
        for unit in self._units:
            if unit.module not in self._roots:
                unit.module.set_reshard_after_forward(zero == 3, recurse=False)

    def gather(self) -> None:
        """At the start of a step: gathers that are made once are all started, and awaited as each unit runs."""
        if self.zero < 3:
            for unit in self._units:
                unit.module.unshard(async_op=True)

    def before_backward(self, last: bool) -> None:
        """In a loop without a pipeline, between a micro-batch's forward and its backward."""
        reduces = last or self.zero >= 2
        for root in self._roots:
            root.set_is_last_backward(last)
            root.set_requires_gradient_sync(reduces)
            root.set_reshard_after_backward(last or self.zero == 3)
        if reduces and self._units:
            self._reductions.begin(last)
            for parameter in self._parameters:
                parameter.grad = None

    def accumulate(self) -> None:
        """After weight gradients that a schedule computed by themselves: keep their sums in the type of a reduction."""
        if self._policy.reduce_dtype:
            for unit in self._units:
                unit.accumulate()

    def complete(self) -> None:
        """After the last backward: wait until all gradients are summed, over the data ranks, the ends of the pipeline
        and tp."""
        self._reductions.complete()
        sum_over_ends(self._embeddings, self._world)
        sum_over_tp(self._stages, self._world)


def named_parameters(stages: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Of all stages of a rank. Names carry global layer numbers, so no two are alike, but that a head's copy of the
    embedding's weight has the name of what it is a copy of."""
    copies = {id(parameter) for parameter in copied(stages)}
    for name, parameter in chain.from_iterable(stage.named_parameters() for stage in stages):
        yield EMBEDDING if id(parameter) in copies else name, parameter


def copied(stages: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """The head's weight, where it is a copy of the embedding's on another stage."""
    for module in chain.from_iterable(stage.modules() for stage in stages):
        if isinstance(module, Head) and module.copied:
            yield module.weight


def is_expert(stages: Sequence[nn.Module]) -> dict[str, bool]:
    """Parameter name -> whether it is an expert's."""
    inside = {
        f"{prefix}.{name}"
        for stage in stages
        for prefix, module in stage.named_modules()
        if isinstance(module, Experts)
        for name, _ in module.named_parameters()
    }
    return {name: name in inside for name, _ in named_parameters(stages)}


def replicated_over_tp(stages: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters that are whole on each tensor rank but saw only its slice of the sequence: norms and routers."""
    experts = is_expert(stages)
    for name, parameter in named_parameters(stages):
        on_tp = isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
        if not experts[name] and not on_tp:
            yield parameter


def sum_over_ends(embeddings: Sequence[nn.Parameter], world: World) -> None:
    """Give the embedding's weight and the head's copy of it, on this rank or another, the sum of their gradients: the
    same bits, so that the optimizer keeps them equal to the bit."""
    grads = [local_shard(p.grad) for p in embeddings if p.grad is not None]
    if not grads or (len(grads) == 1 and world.ends.size == 1):
        return
    total = world.ends.all_reduce(torch.stack(grads).sum(0))
    for grad in grads:
        grad.copy_(total)


def sum_over_tp(stages: Sequence[nn.Module], world: World) -> None:
    """Complete the gradients of what is replicated over tp, in one fused reduction."""
    if world.tp.size == 1:
        return
    grads = [local_shard(p.grad) for p in replicated_over_tp(stages) if p.grad is not None]
    flat = world.tp.all_reduce(torch.cat([grad.flatten() for grad in grads]))
    for grad, total in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
