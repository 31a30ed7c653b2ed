"""Data parallelism: FSDP2 shards parameters, gradients and optimizer state; the ZeRO stage determines when FSDP2
communicates.

Gradients are reduced as sums, because the loss is already divided by the global number of tokens. Experts are sharded
on the expert mesh, everything else on the dense mesh. Replicas (HSDP) have equal shards: each replica reduces gradients
among its ranks, and the results are summed over the replicas once per step. A rank has the same index within its
replica on both meshes, so both meshes share one replica axis.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engine.model.interface import Block
from engine.model.moe.moe_layer import Experts
from engine.model.stage import Stage
from engine.model.vocabulary import Embedding, Head
from engine.parallel.collectives import Axis
from engine.parallel.initial_values import InitialValues
from engine.parallel.local_shards import local_shard
from engine.parallel.mesh import World
from engine.sharding.compression.reductions import Compression
from engine.sharding.filling import Unfilled
from engine.sharding.fsdp_check import probe
from engine.sharding.fsdp_hooks import FsdpUnit, GradientReductions

EMBEDDING = "embedding.weight"

# Each rank keeps and updates its shard in fp32. With bf16 or fp16, FSDP2 casts weights to that dtype when it
# gathers them.
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
    "fp16": MixedPrecisionPolicy(torch.float16, torch.float32, cast_forward_inputs=False),
}


class Shards:
    """Shards all stages of a rank in place: experts on the expert mesh, everything else on the dense mesh.

    With `by_block`, each block, its experts and the head are separate FSDP units. So the communication of a unit
    overlaps with the computation of other units, and ZeRO 3 can free gathered units. The embedding, the last norm and a
    tied head belong to the root unit of their stage. Without `by_block`, the experts of a stage are one unit and the
    rest of the stage is another. With a pipeline, gradients are reduced once per step, when there is no computation
    left to overlap with, so fewer units are faster.

    FSDP wraps a stage even on a mesh of size 1, because torch's pipelining reduces only the gradients of FSDP modules.
    Exception: a run in fp32 that has one pipeline rank and one replica and shards nothing does not wrap its stage,
    because small steps are 10 % faster without FSDP.

    The ZeRO stage determines when units are gathered and reduced, and can change between steps. In ZeRO stages 0 and 1,
    units are gathered and reduced once per step. In ZeRO stage 2, units are gathered once per step and, without a
    pipeline, reduced for each micro-batch. In ZeRO stage 3, units are gathered at each use.

    Parameters in `unfilled` are on the meta device; the constructor allocates them and fills them with their initial
    values, shard by shard.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        world: World,
        zero: int,
        by_block: bool,
        precision: str = "fp32",
        unfilled: Mapping[nn.Parameter, InitialValues] = {},
        seed: int = 0,
    ):
        self._stages, self._world = stages, world
        to_fill = Unfilled(stages, unfilled)
        self._policy = POLICIES[precision]
        self.compression = Compression(world.replicas, seed)
        self._reductions = GradientReductions(world.replicas, self.compression)
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
        of_experts = is_expert(stages)
        to_fill.fill(lambda name: world.edp if of_experts.get(name) else world.dp, world.device)
        self._prefetch()
        # List the sharded parameters now, because between the forward and backward pass `stage.parameters()`
        # has the gathered ones.
        self._parameters = [parameter for _, parameter in named_parameters(stages)]
        names = {parameter: name for name, parameter in named_parameters(stages)}
        for number, fsdp_unit in enumerate(self._units):
            fsdp_unit.name(number, names)
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

    def _prefetch(self) -> None:
        """In ZeRO 3, each block starts gathering its experts and the next unit before it computes. By default, FSDP2
        gathers a unit only when the host reaches it. With ep, this would be too late, because the host first waits for
        the row counts of the all-to-all. In the backward pass the host does not wait, so FSDP2's own prefetch of the
        preceding unit is early enough.

        Expert units do not prefetch other units, because with full recompute their forward pass also runs during the
        backward pass of their block.
        """
        sharded = {unit.module for unit in self._units}
        for root in self._roots:
            units = [module for module in root.modules() if module in sharded]  # type: ignore[attr-defined]
            firsts = [module for module in units if not isinstance(module, Experts)]
            for module, following in zip(firsts, [*firsts[1:], None], strict=True):
                inside = [m for m in units if isinstance(m, Experts) and m in set(module.modules())]
                own = inside if module is not root else []
                module.set_modules_to_forward_prefetch([*own, *([following] if following else [])])

    def use_zero(self, zero: int) -> None:
        """Set the ZeRO stage for the next step. In every ZeRO stage, the root unit of a pipeline stage stays gathered
        after its forward pass."""
        self.zero = zero
        for unit in self._units:
            if unit.module not in self._roots:
                unit.module.set_reshard_after_forward(zero == 3, recurse=False)

    def gather(self) -> None:
        """If the ZeRO stage is below 3, start gathering all units at the start of a step. A unit's forward pass waits
        until the unit is gathered."""
        if self.zero < 3:
            for unit in self._units:
                unit.module.unshard(async_op=True)

    def release(self) -> None:
        """Free the gathered units after a forward pass that has no backward pass, such as in validation."""
        for unit in self._units:
            unit.finish_gather()
            unit.end_forward()
            unit.module.reshard()
            unit.forget_forwards()

    def before_backward(self, last: bool) -> None:
        """Prepare for a backward pass. In runs without a pipeline, call this method for each micro-batch, between the
        forward and the backward pass. In runs with a pipeline, do not call it."""
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
        """Accumulate the weight gradients of a split backward pass in the reduction dtype. Call this method after each
        split backward pass."""
        if self._policy.reduce_dtype:
            for unit in self._units:
                unit.accumulate()

    def complete(self) -> None:
        """Complete the gradients after the last backward pass: sum them over the data-parallel ranks, over the two ends
        of the pipeline (tied weights) and over tp."""
        self._reductions.complete()
        self.compression.flush(self._parameters)
        sum_over_ends(self._embeddings, self._world)
        sum_over_tp(self._stages, self._world)


def named_parameters(stages: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of all stages of a rank. Names contain global layer indices. Names are unique, except that
    the head's copy of the embedding's weight has the same name as the embedding's weight."""
    copies = {id(parameter) for parameter in copied(stages)}
    for name, parameter in chain.from_iterable(stage.named_parameters() for stage in stages):
        yield EMBEDDING if id(parameter) in copies else name, parameter


def copied(stages: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the last stage's copy of the embedding's weight, if a tied head or multi-token prediction uses one."""
    for module in chain.from_iterable(stage.modules() for stage in stages):
        if isinstance(module, Head | Embedding) and module.copied:
            yield module.weight


def is_expert(stages: Sequence[nn.Module]) -> dict[str, bool]:
    """Maps each parameter's name to whether the parameter belongs to an expert."""
    inside = {
        f"{prefix}.{name}"
        for stage in stages
        for prefix, module in stage.named_modules()
        if isinstance(module, Experts)
        for name, _ in module.named_parameters()
    }
    return {name: name in inside for name, _ in named_parameters(stages)}


def replicated_over_tp(stages: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters that are replicated over tp: norms, routers, shared experts. Each tp rank has only the part of their
    gradients that comes from its slice of the sequence."""
    experts = is_expert(stages)
    for name, parameter in named_parameters(stages):
        on_tp = isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
        if not experts[name] and not on_tp:
            yield parameter


def sum_over_ends(embeddings: Sequence[nn.Parameter], world: World) -> None:
    """Sum the gradients of the embedding's weight and of the head's copy of this weight, which may be on another rank.
    The two weights get bit-identical gradients, so the optimizer keeps the two weights bit-identical."""
    grads = [local_shard(p.grad) for p in embeddings if p.grad is not None]
    if not grads or (len(grads) == 1 and world.ends.size == 1):
        return
    total = world.ends.all_reduce(torch.stack(grads).sum(0))
    for grad in grads:
        grad.copy_(total)


def sum_over_tp(stages: Sequence[nn.Module], world: World) -> None:
    """Sum the gradients of parameters replicated over tp, in one fused all-reduce."""
    if world.tp.size == 1:
        return
    grads = [local_shard(p.grad) for p in replicated_over_tp(stages) if p.grad is not None]
    flat = world.tp.all_reduce(torch.cat([grad.flatten() for grad in grads]))
    for grad, total in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
