"""Moves experts and their optimizer state between ranks, for all layers of a stage in one all-to-all.

FSDP shards a rank's stack of experts along dim 0, so each expert is stored whole on one rank of the [efsdp, ep] mesh.
That rank sends the expert to the rank that stores the expert according to the new map. The transfer copies bytes, so
values are not rounded. The constructor of `Move` makes all allocations, because these may fail; `Move.run` only sends
and copies.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.model.moe.moe_layer import MoeLayer
from engine.parallel.local_shards import local_shard
from engine.parallel.mesh import World
from engine.planner.expert_placement import Map, slots_per_rank


class Move:
    """Moves experts so that they match `maps`, the layers' new expert maps. The constructor allocates all buffers;
    `run` sends and receives the experts."""

    def __init__(
        self,
        layers: Mapping[int, MoeLayer],
        maps: Mapping[int, Map],
        optimizer: torch.optim.Optimizer,
        world: World,
        residuals: Mapping[nn.Parameter, Tensor] | None = None,
    ):
        self._layers, self._maps, self._axis = layers, maps, world.expert_ranks
        self._shards = {n: _shards(layer.experts, optimizer, residuals or {}) for n, layer in layers.items()}
        P, rank_here = self._axis.size, self._axis.rank
        # By destination rank: experts to send, as (layer, row on this rank).
        self._sends: list[list[tuple[int, int]]] = [[] for _ in range(P)]
        self._receives: list[list[tuple[int, int]]] = [[] for _ in range(P)]
        for n, layer in layers.items():
            now = layer.placement.logical
            held = slots_per_rank(len(now), world.grid.ep, world.grid.efsdp)
            at = {slot: (rank, row) for rank in range(P) for row, slot in enumerate(held[rank])}
            for slot, expert in enumerate(maps[n]):
                (source, row), (target, new_row) = at[now.index(expert)], at[slot]
                if (source, row) != (target, new_row):
                    if source == rank_here:
                        self._sends[target].append((n, row))
                    if target == rank_here:
                        self._receives[source].append((n, new_row))
        width = sum(_width(shard) for shard in next(iter(self._shards.values())))
        rows = [_packed(self._shards[n], row) for send_rows in self._sends for n, row in send_rows]
        self._out = (
            torch.stack(rows) if rows else torch.empty(0, width, dtype=torch.uint8, device=world.device)
        )
        self._in = self._out.new_empty((sum(map(len, self._receives)), width))

    @torch.no_grad()
    def run(self) -> None:
        """Send and receive the experts, and set the new maps. All ranks that share one copy of the stage's experts must
        call this method (it is a collective)."""
        send, receive = [len(rows) for rows in self._sends], [len(rows) for rows in self._receives]
        self._axis.all_to_all(self._out, send, receive, self._in)
        slots = [slot for receive_rows in self._receives for slot in receive_rows]
        for packed, (n, row) in zip(self._in, slots, strict=True):
            widths = [_width(shard) for shard in self._shards[n]]
            for shard, raw in zip(self._shards[n], packed.split(widths), strict=True):
                shard[row].view(-1).view(torch.uint8).copy_(raw)
        for n, layer in self._layers.items():
            layer.set_placement(self._maps[n])


def _shards(
    experts: nn.Module, optimizer: torch.optim.Optimizer, residuals: Mapping[nn.Parameter, Tensor]
) -> Sequence[Tensor]:
    """Parameters of this rank's experts, each followed by its optimizer state and by the residual of its compressed
    gradient; dimension 0 of every tensor is the index of the expert."""
    shards: list[Tensor] = []
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for _, parameter in sorted(experts.named_parameters()):
        assert id(parameter) in optimized, "FSDP has gathered the experts: values written now would be lost"
        state = optimizer.state.get(parameter, {})
        moments = [
            x for _, x in sorted(state.items()) if isinstance(x, Tensor) and x.shape == parameter.shape
        ]
        shards += [local_shard(x.detach()) for x in (parameter, *moments)]
        if parameter in residuals:
            shards.append(residuals[parameter][: len(shards[-1])])
    return shards


def _width(shard: Tensor) -> int:
    """The number of bytes that one expert occupies in `shard`."""
    return shard.shape[1:].numel() * shard.element_size()


def _packed(shards: Sequence[Tensor], row: int) -> Tensor:
    """Row `row` of each tensor in `shards` (one expert's parameters, optimizer state and residuals), as bytes."""
    return torch.cat([shard[row].contiguous().view(-1).view(torch.uint8) for shard in shards])


def bytes_of_an_expert(
    layer: MoeLayer, optimizer: torch.optim.Optimizer, residuals: Mapping[nn.Parameter, Tensor]
) -> int:
    """The number of bytes of one expert of the layer, including its optimizer state and the residual of its compressed
    gradient."""
    return sum(_width(shard) for shard in _shards(layer.experts, optimizer, residuals))
