"""Finds the MoE layers of this rank and the experts in its shards."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.model.moe.moe_layer import MoeLayer
from engine.parallel.mesh import World
from engine.planner.expert_placement import slots_per_rank


def moe_layers(stages: Iterable[nn.Module]) -> dict[int, MoeLayer]:
    """The MoE layers of this rank by global layer index."""
    layers = [module for stage in stages for module in stage.modules() if isinstance(module, MoeLayer)]
    return {layer.layer: layer for layer in sorted(layers, key=lambda layer: layer.layer)}


def local_experts(layer: MoeLayer, weights: Tensor, world: World) -> list[int]:
    """The logical experts in this rank's shard of `weights`, in the order of its rows. `weights` is a stacked expert
    parameter of the layer, or a tensor with the same sharding.

    FSDP shards the experts of an ep rank over efsdp. Without FSDP, as in `engine sample`, they are whole on each rank.
    """
    logical, at, ep = layer.placement.logical, world.coords, world.grid.ep
    axes = weights.device_mesh.mesh_dim_names if isinstance(weights, DTensor) else None
    shards, shard = (world.grid.efsdp, at["efsdp"]) if "efsdp" in (axes or ()) else (1, 0)
    return [logical[slot] for slot in slots_per_rank(len(logical), ep, shards)[shard * ep + at["ep"]]]
