"""The optimizer and the gradient norm over meshes that differ: experts, tensor shards, and what is replicated."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.config.layout import Train
from engine.parallel.local_shards import local_shard
from engine.parallel.mesh import World
from engine.sharding.fsdp import copied, named_parameters, replicated_over_tp


def make_optimizer(stages: Sequence[nn.Module], train: Train) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not. Over the shards as FSDP keeps them, so its state is sharded alike.

    A group is of one mesh, for the fused kernels take a list of tensors at once and a list cannot span meshes.
    """
    alike: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for _, p in named_parameters(stages):
        alike.setdefault((p.ndim > 1, p.device_mesh if isinstance(p, DTensor) else None), []).append(p)
    groups = [
        {"params": parameters, "weight_decay": train.weight_decay if matrix else 0.0}
        for (matrix, _), parameters in alike.items()
    ]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.lr)  # its fused kernel knows no DTensor
    return torch.optim.AdamW(groups, lr=train.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(train: Train, step: int, scale: float) -> float:
    """Linear warm-up, then constant; `scale` is the operator's."""
    return train.lr * scale * min(1.0, (step + 1) / max(1, train.warmup))


class GradientNorm:
    """The norm of the whole model's gradient, each distinct number counted once wherever its copies live."""

    def __init__(self, stages: Sequence[nn.Module], world: World):
        self._world = world
        grid = world.grid
        over_tp = {id(p) for p in replicated_over_tp(stages)}
        copies = (
            (p, grid.dp_replicate * (grid.tp if id(p) in over_tp else 1)) for _, p in named_parameters(stages)
        )
        elsewhere = {id(p) for p in copied(stages)}  # their gradient is the embedding's, which counts
        self._weighted = [(p, 0.0 if id(p) in elsewhere else 1.0 / count) for p, count in copies]

    def __call__(self) -> Tensor:
        """The 2-norm, the same on every rank."""
        by_weight: dict[float, list[Tensor]] = {}
        for parameter, weight in self._weighted:
            if parameter.grad is not None:
                by_weight.setdefault(weight, []).append(local_shard(parameter.grad))
        squares = torch.zeros((), device=self._world.device)
        for weight, grads in by_weight.items():
            norms = torch.stack(torch._foreach_norm(grads))
            squares += weight * norms.square().sum()
        return self._world.control.all_gather(squares.cpu()).sum().sqrt()

    def clip(self, norm: float, most: float) -> None:
        """Scale all gradients so that their norm is at most `most`."""
        factor = most / (norm + 1e-6)
        if factor < 1.0:
            grads = [local_shard(p.grad) for p, _ in self._weighted if p.grad is not None]
            torch._foreach_mul_(grads, factor)
