"""Experts from rank to rank with their optimizer state, all of a stage's layers in one all-to-all.

FSDP keeps a rank's stack of experts cut along dim 0, so an expert lies whole on one rank of the expert view's
[efsdp, ep] ranks, and goes from there to the holder of its new slot. Bytes are moved, not numbers: nothing rounds.
Everything that may fail (memory) happens in `Move`; `Move.run` only sends and copies.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.model.moe import MoeLayer
from engine.parallel.local_shards import local_shard
from engine.parallel.mesh import World
from engine.planner.expert_placement import Map, slots_per_rank


class Move:
    """The move of this rank's layers to new maps, prepared: buffers made, nothing sent yet.

    `maps` gives the new map of each layer in `layers`.
    """

    def __init__(
        self,
        layers: Mapping[int, MoeLayer],
        maps: Mapping[int, Map],
        optimizer: torch.optim.Optimizer,
        world: World,
    ):
        self._layers, self._maps, self._axis = layers, maps, world.expert_ranks
        self._shards = {n: _shards(layer.experts, optimizer) for n, layer in layers.items()}
        P, me = self._axis.size, self._axis.rank
        self._going: list[list[tuple[int, int]]] = [[] for _ in range(P)]  # by destination: (layer, row here)
        self._coming: list[list[tuple[int, int]]] = [[] for _ in range(P)]
        for n, layer in layers.items():
            now = layer.placement.logical
            held = slots_per_rank(len(now), world.grid.ep, world.grid.efsdp)
            at = {slot: (rank, row) for rank in range(P) for row, slot in enumerate(held[rank])}
            for slot, expert in enumerate(maps[n]):
                (source, row), (target, new_row) = at[now.index(expert)], at[slot]
                if (source, row) != (target, new_row):
                    if source == me:
                        self._going[target].append((n, row))
                    if target == me:
                        self._coming[source].append((n, new_row))
        width = sum(_width(shard) for shard in next(iter(self._shards.values())))
        rows = [_packed(self._shards[n], row) for going in self._going for n, row in going]
        self._out = (
            torch.stack(rows) if rows else torch.empty(0, width, dtype=torch.uint8, device=world.device)
        )
        self._in = self._out.new_empty((sum(map(len, self._coming)), width))

    @torch.no_grad()
    def run(self) -> None:
        send, receive = [len(rows) for rows in self._going], [len(rows) for rows in self._coming]
        self._axis.all_to_all(self._out, send, receive, self._in)
        places = [place for coming in self._coming for place in coming]
        for packed, (n, row) in zip(self._in, places, strict=True):
            widths = [_width(shard) for shard in self._shards[n]]
            for shard, raw in zip(self._shards[n], packed.split(widths), strict=True):
                shard[row].view(-1).view(torch.uint8).copy_(raw)
        for n, layer in self._layers.items():
            layer.set_placement(self._maps[n])


def _shards(experts: nn.Module, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
    """Everything that belongs to this rank's experts, [rows, ...] each: parameters, then their optimizer state."""
    shards: list[Tensor] = []
    kept = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for _, parameter in sorted(experts.named_parameters()):
        assert id(parameter) in kept, "FSDP holds experts gathered: what is written to them would be lost"
        state = optimizer.state.get(parameter, {})
        alike = [x for _, x in sorted(state.items()) if isinstance(x, Tensor) and x.shape == parameter.shape]
        shards += [local_shard(x.detach()) for x in (parameter, *alike)]
    return shards


def _width(shard: Tensor) -> int:
    """Bytes of one expert."""
    return shard.shape[1:].numel() * shard.element_size()


def _packed(shards: Sequence[Tensor], row: int) -> Tensor:
    return torch.cat([shard[row].contiguous().view(-1).view(torch.uint8) for shard in shards])


def bytes_of_an_expert(layer: MoeLayer, optimizer: torch.optim.Optimizer) -> int:
    """With its optimizer state."""
    return sum(_width(shard) for shard in _shards(layer.experts, optimizer))
