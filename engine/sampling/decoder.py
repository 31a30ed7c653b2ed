"""Runs a model token by token with its caches, on the ranks of a tp x pp x ep grid.

No tokens are dropped, because an expert's capacity depends on the length of the whole sequence, which is not known yet.

Shapes: B sequences, Q new tokens, s tokens of this rank's slice of the padded pass, D model, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.checkpoint.manifest import Checkpoint
from engine.checkpoint.restore_in_any_layout import restore
from engine.checkpoint.state_tensors import State
from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.metering.meter import Meter
from engine.model.stage import Stage
from engine.model.transformer import TransformerBlock
from engine.model.vocabulary import Head
from engine.parallel.autograd_collectives import gather_sequence
from engine.parallel.mesh import World
from engine.parallel.parameters import ParameterFactory
from engine.planner.layer_split import split_layers
from engine.sampling.cache import Cache, cache_of
from engine.sharding.filling import allocate
from engine.sharding.pipeline_schedules import ACTIVATIONS


class Decoder:
    """This rank's stage of a model, with caches for `batch` sequences of at most `positions` tokens.

    The constructor is collective. `layout` uses only pp, tp and ep, and has one stage per rank
    (`engine.sampling.settings`). `length` is the number of tokens that the caches hold.
    """

    def __init__(self, layout: Layout, world: World, meter: Meter, batch: int, positions: int):
        self.world, self._meter, self._model = world, meter, layout.model
        self.dtype = ACTIVATIONS.get(layout.train.precision, torch.get_default_dtype())
        factory = ParameterFactory(
            layout.run.seed,
            world.tp,
            world.ep,
            world.dense["tp"],
            world.expert["ep"],
            world.ep_hops,
            device=world.device,
            deferred=True,
        )
        layers = split_layers(layout.model, layout.stages)[world.pp.rank]
        self.stage = Stage(factory, layout.model, layers, KnobValues.of(layout), meter)
        allocate(self.stage, world.device, self.dtype)
        self._blocks = [block for block in self.stage.layers.values() if isinstance(block, TransformerBlock)]
        self._caches: list[Cache] = [
            cache_of(block.attention, batch, positions, self.dtype) for block in self._blocks
        ]
        self.length = 0

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the weights of a checkpoint of any layout. Collective; raises RefusedError on all ranks."""
        restore(checkpoint, State([self.stage], None, self.world))

    @property
    def cache_bytes(self) -> int:
        """Bytes of this rank's caches."""
        return sum(cache.stored.untyped_storage().nbytes() for cache in self._caches)

    @torch.no_grad()
    def run(self, tokens_BQ: Tensor, last: bool = True) -> Tensor | None:
        """Run the model on the next tokens of each sequence. Returns the logits of the last token, [B, 1, V], or of all
        tokens, on the ranks of the last stage, and None on other ranks. Collective."""
        count, pp, tp = tokens_BQ.shape[1], self.world.pp, self.world.tp
        self._meter.start_step(self.length)
        slice_ = -(-count // tp.size)
        if pp.rank == 0:
            x = F.pad(tokens_BQ, (0, slice_ * tp.size - count))
        else:
            x = torch.empty(
                len(tokens_BQ), slice_, self._model.d_model, dtype=self.dtype, device=self.world.device
            )
            pp.receive(x, pp.rank - 1)
        x = self._through_layers(x, count)
        self.length += count
        if pp.rank < pp.size - 1:
            pp.send(x, pp.rank + 1)
            return None
        return self._logits(x, count, last)

    def _through_layers(self, x: Tensor, count: int) -> Tensor:
        if self.stage.embedding is not None:
            x = self.stage.embedding(x)
        for block, cache in zip(self._blocks, self._caches, strict=True):
            with self._meter.in_layer(block.layer):
                x = x + cache.attend(block.attention_norm(x), self.length, count)
                x = block.mlp_block(x, {})
        return x

    def _logits(self, x_BsD: Tensor, count: int, last: bool) -> Tensor:
        assert self.stage.norm is not None and isinstance(self.stage.head, Head)
        x_BQD = gather_sequence(self.stage.norm(x_BsD), self.world.tp)[:, count - 1 if last else 0 : count]
        parts = self.world.tp.all_gather(self.stage.head.project(x_BQD))
        return parts.movedim(0, 2).flatten(2)
