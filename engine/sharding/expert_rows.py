"""Finds the MoE layers of this rank and the experts in its shards."""

from collections.abc import Iterable

from torch import nn

from engine.model.moe.moe_layer import MoeLayer
from engine.parallel.mesh import World
from engine.planner.expert_placement import slots_per_rank


def moe_layers(stages: Iterable[nn.Module]) -> dict[int, MoeLayer]:
    """The MoE layers of this rank by global layer index."""
    layers = [module for stage in stages for module in stage.modules() if isinstance(module, MoeLayer)]
    return {layer.layer: layer for layer in sorted(layers, key=lambda layer: layer.layer)}


def local_experts(layer: MoeLayer, world: World) -> list[int]:
    """The logical experts in this rank's shard, in the order of its rows."""
    logical = layer.placement.logical
    held = slots_per_rank(len(logical), world.grid.ep, world.grid.efsdp)
    return [logical[slot] for slot in held[world.coords["efsdp"] * world.grid.ep + world.coords["ep"]]]
