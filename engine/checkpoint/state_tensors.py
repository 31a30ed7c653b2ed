"""The state of a run as tensors, under names that do not depend on the layout.

    model.layers.3.attention.q              a DTensor: saved in shards, can be loaded with any sharding
    model.layers.3.mlp.experts.gate.7       expert 7, a whole tensor on the rank that has it
    optimizer.exp_avg.layers.3.attention.q  also a DTensor
    optimizer.step.layers.3.attention.q     a number
    residual.1.layers.3.attention.q         gradient-compression residual; 1: index among the ranks that keep one
    factor.0.layers.3.attention.q           PowerSGD's factor for the shard at position 0 of a replica

In each replica, every rank that computes its own gradient of a parameter keeps a residual of the parameter: every tp
rank if the parameter is replicated over tp, and both ends of the pipeline for a tied embedding. The ranks that have a
residual of a parameter are called the parameter's *holders*. Training depends only on the sum of a parameter's
residuals, so this sum can be divided among other holders when the layout changes
(`engine/checkpoint/restore_in_any_layout.py`).

Experts are stacked, and FSDP shards the stack along its first dimension, so a rank holds whole experts. There is no RNG
state to save: initial values and samples are functions of the seed, and training draws no other random numbers.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from engine.model.moe.moe_layer import MoeLayer
from engine.parallel.local_shards import local_shard, with_layout_of
from engine.parallel.mesh import World
from engine.sharding.compression.reductions import Compression
from engine.sharding.expert_rows import local_experts
from engine.sharding.fsdp import EMBEDDING, copied, named_parameters, replicated_over_tp


class State:
    """Parameters, optimizer state and persistent buffers of a rank. The tensors are those of the live run, not copies.
    Without an optimizer there are only weights and buffers. `embedding_copies`: number of copies of the embedding's
    weight; 2 if a tied head has its own copy."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        world: World,
        compression: Compression | None = None,
        embedding_copies: int = 1,
    ):
        self._stages, self._optimizer, self._world = stages, optimizer, world
        self.compression, self._embedding_copies = compression, embedding_copies
        self._over_tp, self._copied = set(replicated_over_tp(stages)), set(copied(stages))
        # These are the shards that FSDP keeps between steps. While parameters are gathered, `stage.parameters()` has
        # the gathered tensors instead.
        self._parameters = dict(named_parameters(stages))
        # If an embedding and its tied copy in the head are both on this rank, they share one name.
        self._tied_copies = [(n, p) for n, p in named_parameters(stages) if p is not self._parameters[n]]
        self._layer_of = {  # name of an expert parameter -> its layer
            f"{prefix}.experts.{name}": module
            for stage in stages
            for prefix, module in stage.named_modules()
            if isinstance(module, MoeLayer)
            for name, _ in module.experts.named_parameters()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor. The tensors are those of the live run, not copies."""
        if self._optimizer and not self._optimizer.state:
            create_state(self._optimizer)
        return dict(self._tensors())

    @torch.no_grad()
    def update_tied_copies(self) -> None:
        """For each tied weight of which this rank has a second copy, update this copy and its optimizer state from the
        loaded weight. Call this method after writing to `tensors`."""
        for name, tied_copy in self._tied_copies:
            loaded = self._parameters[name]
            local_shard(tied_copy).copy_(local_shard(loaded))
            for key, value in self._optimizer_state(loaded):
                assert self._optimizer
                local_shard(self._optimizer.state[tied_copy][key]).copy_(local_shard(value))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield from self._whole("model", name, parameter)
            for key, value in self._optimizer_state(parameter):
                yield from self._whole(f"optimizer.{key}", name, value)
        if self.compression:
            for name, parameter in named_parameters(self._stages):
                if parameter in self.compression.residuals:
                    yield from self.residual(name, parameter, self.holder(name, parameter)[0])
                if parameter in self.compression.factors:
                    yield self.factor_name(name, parameter), self.compression.factors[parameter]
        for stage in self._stages:
            parameters = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
            for name, tensor in stage.state_dict().items():
                if name not in parameters:
                    yield f"model.{name}", tensor

    def _optimizer_state(self, parameter: nn.Parameter) -> Iterable[tuple[str, Tensor]]:
        return self._optimizer.state[parameter].items() if self._optimizer else ()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(named_parameters(self._stages))

    def residual(self, name: str, parameter: nn.Parameter, holder: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) pairs for this rank's residual of a parameter, that is, the part of its gradients that
        compression has not sent yet. Several ranks keep a residual of the same parameter, and a checkpoint stores each
        under its own name: the names are those for the rank with index `holder` among these ranks."""
        assert self.compression
        value = with_layout_of(parameter, self.compression.residual(parameter))
        yield from self._whole(f"residual.{holder}", name, value)

    def holder(self, name: str, parameter: nn.Parameter) -> tuple[int, int]:
        """The index of this rank among the holders of its part of a parameter (the ranks that keep a residual of the
        same part), and the number of these holders."""
        grid, at = self._world.grid, self._world.coords
        ends = self._embedding_copies if name == EMBEDDING else 1
        ways = grid.tp if parameter in self._over_tp else 1
        index = at["dp_replicate"] * ends + (parameter in self._copied)
        return index * ways + (at["tp"] if ways > 1 else 0), grid.dp_replicate * ends * ways

    def factor_name(self, name: str, parameter: nn.Parameter) -> str:
        """The name under which a checkpoint stores this rank's PowerSGD factor for a parameter. The ranks that hold
        replicas of the same shard use the same name."""
        grid, at = self._world.grid, self._world.coords
        position = (at["fsdp"] * grid.tp + at["tp"]) + grid.fsdp * grid.tp * (parameter in self._copied)
        return f"factor.{position}.{name}"

    def _whole(self, kind: str, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        if value.ndim == 0 or name not in self._layer_of:
            yield f"{kind}.{name}", value.detach()
            return
        experts = local_experts(self._layer_of[name], value, self._world)
        for row, expert in zip(local_shard(value.detach()), experts, strict=True):
            yield f"{kind}.{name}.{expert}", row


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state, filled with zeros. Without this call, the optimizer would create its state only at
    its first step."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
