"""The data axis: parameters, gradients and optimizer state sharded by FSDP2, its traffic through the metered door.

Gradients are reduced as sums; the loss was divided once, by the global count of valid tokens. Experts are sharded on
the expert mesh, everything else on the dense one. Replicas (HSDP) hold the same shards of the same numbers: what a
replica's ranks have reduced among themselves is summed over the replicas once a step, experts and all else together.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from engine.model.moe import Experts, MoeLayer
from engine.model.transformer import Block, Stage
from engine.parallel.comm import Axis
from engine.parallel.world import World


class _Door:
    """What FSDP2 asks of a custom collective: a buffer, and the call. torch does not export the base class of it."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Door):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        output_tensor.view(self.axis.size, -1).copy_(self.axis.all_gather(input_tensor.view(-1)))


class _ReduceScatter(_Door):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(self.axis.reduce_scatter(input_tensor.view(self.axis.size, -1)))


def shard(stage: Stage, world: World, zero: int) -> FSDPModule:
    """Shard a stage in place: experts on the expert mesh, all else on the dense one.

    ZeRO 3 gathers block by block; below it a stage is one unit, so that a step has one gather and one reduction.
    The root is sharded on a mesh of size 1 too, or torch's pipelining would not reduce its gradients.
    """
    again = zero == 3  # gathered again at each use
    dense, expert = world.dense["fsdp"], world.expert["efsdp"]
    blocks = [module for module in stage.modules() if isinstance(module, Block)]
    sharded: list[tuple[nn.Module, Axis]] = []
    for block in blocks:
        if isinstance(block.mlp, MoeLayer):
            fully_shard(block.mlp.experts, mesh=expert, reshard_after_forward=again)
            sharded.append((block.mlp.experts, world.edp))
        if again:
            fully_shard(block, mesh=dense, reshard_after_forward=True)
            sharded.append((block, world.dp))
    root = fully_shard(stage, mesh=dense, reshard_after_forward=False)
    sharded.append((stage, world.dp))
    for module, axis in sharded:
        assert isinstance(module, FSDPModule)
        module.set_force_sum_reduction_for_comms(True)  # before the factor: gloo has no PREMUL_SUM
        module.set_gradient_divide_factor(1.0)
        if axis.size > 1:
            module.set_custom_all_gather(_AllGather(axis))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(_ReduceScatter(axis))  # type: ignore[arg-type]
    return root


def named_parameters(stages: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Of all stages of a rank: names carry global layer numbers, so no two are alike."""
    return chain.from_iterable(stage.named_parameters() for stage in stages)


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


def shard_of(tensor: Tensor) -> Tensor:
    """The part of a parameter or gradient that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replicated_over_tp(stages: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters that are whole on each tensor rank but saw only its slice of the sequence: norms and routers."""
    experts = is_expert(stages)
    for name, parameter in named_parameters(stages):
        on_tp = isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
        if not experts[name] and not on_tp:
            yield parameter


def sum_over_tp(stages: Sequence[nn.Module], world: World) -> None:
    """Complete the gradients of what is replicated over tp, in one fused reduction."""
    _sum_over(world.tp, replicated_over_tp(stages))


def sum_over_replicas(stages: Sequence[nn.Module], world: World) -> None:
    """Complete the gradients of all parameters over the replicas, shard by shard, in one fused reduction.

    A rank's place within its replica is the same in the dense and in the expert view, so one axis serves both.
    """
    _sum_over(world.replicas, (p for _, p in named_parameters(stages)))


def _sum_over(axis: Axis, parameters: Iterable[nn.Parameter]) -> None:
    if axis.size == 1:
        return
    grads = [shard_of(p.grad) for p in parameters if p.grad is not None]
    flat = axis.all_reduce(torch.cat([grad.flatten() for grad in grads]))
    for grad, total in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
