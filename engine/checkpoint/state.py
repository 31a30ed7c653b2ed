"""All that a run continues from, as tensors under names that no layout changes.

    model.layers.3.attention.q                   a DTensor: saved by shard, loaded by any other sharding
    model.layers.3.mlp.experts.gate.7            expert 7, whole, wherever it lives
    optimizer.exp_avg.layers.3.attention.q       likewise
    optimizer.step.layers.3.attention.q          a number

Experts are stacked, and FSDP cuts the stack along its first dimension, so that a rank has whole experts, or none. No
generator has a state to keep: initial values and samples are functions of the seed, and nothing else is drawn.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from engine.model.moe import MoeLayer
from engine.parallel.local_shards import local_shard
from engine.parallel.mesh import World
from engine.sharding.expert_rows import local_experts
from engine.sharding.fsdp import named_parameters


class State:
    """Parameters, optimizer state and persistent buffers of a rank, live: what is written to them is in force."""

    def __init__(self, stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, world: World):
        self._stages, self._optimizer, self._world = stages, optimizer, world
        # As FSDP keeps them between steps; while it has them gathered, a stage would name others.
        self._parameters = dict(named_parameters(stages))
        # An embedding whose copy in the head is on this rank too: one name stands for both.
        self._twins = [(n, p) for n, p in named_parameters(stages) if p is not self._parameters[n]]
        self._layer_of = {  # of an expert's parameter
            f"{prefix}.experts.{name}": module
            for stage in stages
            for prefix, module in stage.named_modules()
            if isinstance(module, MoeLayer)
            for name, _ in module.experts.named_parameters()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, sharing memory with the run."""
        if not self._optimizer.state:
            self._begin_optimizer()
        return dict(self._tensors())

    def copy(self) -> dict[str, Tensor]:
        """`tensors` as they are now, in host memory."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors().items()}

    @torch.no_grad()
    def spread(self) -> None:
        """After `tensors` were written to: give what was loaded to all that it stands for."""
        for name, twin in self._twins:
            loaded = self._parameters[name]
            local_shard(twin).copy_(local_shard(loaded))
            for key, value in self._optimizer.state[loaded].items():
                local_shard(self._optimizer.state[twin][key]).copy_(local_shard(value))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield from self._whole("model", name, parameter)
            for key, value in self._optimizer.state[parameter].items():
                yield from self._whole(f"optimizer.{key}", name, value)
        for stage in self._stages:
            parameters = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
            for name, tensor in stage.state_dict().items():
                if name not in parameters:
                    yield f"model.{name}", tensor

    def _whole(self, kind: str, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        if value.ndim == 0 or name not in self._layer_of:
            yield f"{kind}.{name}", value.detach()
            return
        experts = local_experts(self._layer_of[name], self._world)
        for row, expert in zip(local_shard(value.detach()), experts, strict=True):
            yield f"{kind}.{name}.{expert}", row

    def _begin_optimizer(self) -> None:
        """The state that the optimizer makes at its first step, with zeros in it."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
