"""Allocates and fills the shards of parameters that were created on the meta device.

A rank never holds a whole parameter. When a run starts, the peak memory of a rank consists of the rank's shards, one
block of initial values (`engine/parallel/initial_values.py`) and, where FSDP pads uneven shards, one more shard.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.parallel.collectives import Axis
from engine.parallel.initial_values import InitialValues
from engine.parallel.local_shards import local_shard


class _Initial(NamedTuple):
    """A parameter's initial values, and its number of rows before FSDP shards it."""

    values: InitialValues
    rows: int


class Unfilled:
    """A rank's stages, whose parameters have no memory yet. Create this object before FSDP wraps the stages, because
    FSDP replaces the parameters. Call `fill` afterwards."""

    def __init__(self, stages: Sequence[nn.Module], initial: Mapping[nn.Parameter, InitialValues]):
        self._stages = stages
        self._initials = [
            {
                name: _Initial(initial[parameter], len(local_shard(parameter)))
                for name, parameter in stage.named_parameters(remove_duplicate=False)
                if parameter in initial
            }
            for stage in stages
        ]

    @torch.no_grad()
    def fill(self, axis_of: Callable[[str], Axis], device: torch.device) -> None:
        """Allocate this rank's shards on `device` and fill them. `axis_of` returns the axis over which the parameter
        with the given name is sharded."""
        for stage, initials in zip(self._stages, self._initials, strict=True):
            if not initials:
                continue
            allocate(stage, device)
            for name, parameter in stage.named_parameters():
                axis, initial = axis_of(name), initials[name]
                chunk = -(-initial.rows // axis.size)  # FSDP shards as torch.chunk does
                initial.values.fill(local_shard(parameter), min(axis.rank * chunk, initial.rows))


def allocate(stage: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Allocate memory for all meta tensors of a stage, in `dtype` or in their own dtype. Like `to_empty`, this uses
    `nn.Module._apply`, which replaces the parameters; FSDP2 overrides `_apply` and then uses the new parameters. If
    two modules share a weight, they still share it afterwards."""
    by_parameter: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False):
            by_parameter.setdefault(parameter, []).append((module, name))

    def with_memory(x: Tensor) -> Tensor:
        return torch.empty_like(x, device=device, dtype=dtype) if x.is_meta else x

    stage._apply(with_memory)  # type: ignore[no-untyped-call]
    for (owner, name), *sharers in by_parameter.values():
        for module, other_name in sharers:
            setattr(module, other_name, getattr(owner, name))
