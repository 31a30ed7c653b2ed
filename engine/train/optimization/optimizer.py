"""The optimizer and the gradient norm. Experts, tensor-parallel parameters and replicated parameters are on different
device meshes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.config.sections.training import Train
from engine.parallel.local_shards import local_shard
from engine.parallel.mesh import World
from engine.sharding.fsdp import copied, named_parameters, replicated_over_tp


def make_optimizer(stages: Sequence[nn.Module], train: Train) -> torch.optim.Optimizer:
    """AdamW or SGD over the FSDP shards of the parameters, so the optimizer state is sharded in the same way.

    Weight decay applies only to matrices. All parameters of a group are on the same mesh, because the fused kernels do
    not accept a list of tensors on different meshes.
    """
    by_kind: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for _, p in named_parameters(stages):
        by_kind.setdefault((p.ndim > 1, p.device_mesh if isinstance(p, DTensor) else None), []).append(p)
    groups = [
        {"params": parameters, "weight_decay": train.weight_decay if matrix else 0.0}
        for (matrix, _), parameters in by_kind.items()
    ]
    if train.optimizer == "sgd":
        # Not fused, because the fused SGD kernel does not support DTensor.
        return torch.optim.SGD(groups, lr=train.lr)
    betas = (train.beta1, train.beta2)
    return torch.optim.AdamW(groups, lr=train.lr, betas=betas, eps=train.eps, fused=True)


class GradientNorm:
    """Computes the norm of the whole model's gradient. A gradient that several ranks hold is counted once."""

    def __init__(self, stages: Sequence[nn.Module], world: World):
        self._world = world
        grid = world.grid
        over_tp = {id(p) for p in replicated_over_tp(stages)}
        copies = (
            (p, grid.dp_replicate * (grid.tp if id(p) in over_tp else 1)) for _, p in named_parameters(stages)
        )
        # The head's copy of the embedding has the same gradient as the embedding, which is already counted.
        duplicates = {id(p) for p in copied(stages)}
        self._weighted = [(p, 0.0 if id(p) in duplicates else 1.0 / count) for p, count in copies]

    def __call__(self) -> Tensor:
        """Compute the 2-norm, on the rank's device; the result is bit-identical on all ranks."""
        by_weight: dict[float, list[Tensor]] = {}
        for parameter, weight in self._weighted:
            if parameter.grad is not None:
                by_weight.setdefault(weight, []).append(local_shard(parameter.grad))
        squares = torch.zeros((), device=self._world.device)
        for weight, grads in by_weight.items():
            norms = torch.stack(torch._foreach_norm(grads))
            squares += weight * norms.square().sum()
        return self._world.all_ranks.all_reduce(squares).sqrt()

    def gradients(self) -> list[Tensor]:
        """This rank's shards of all gradients."""
        return [local_shard(p.grad) for p, _ in self._weighted if p.grad is not None]

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale all gradients so that their norm is at most `max_norm`. `norm`: their norm before the scaling, as
        returned by `__call__`."""
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            torch._foreach_mul_(self.gradients(), factor)
