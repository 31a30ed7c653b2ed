"""Runs a model token by token with its caches, on the ranks of a tp x pp x ep grid.

No tokens are dropped, because an expert's capacity depends on the length of the sequence, and this length is not known
until generation ends.

Shapes: B sequences, Q new tokens, s tokens (with padding) of this rank's slice, D model width, V vocabulary.
"""

import sys

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.checkpoint.manifest import Checkpoint
from engine.checkpoint.restore_in_any_layout import restore
from engine.checkpoint.state_tensors import State
from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.metering.meter import Meter
from engine.model.moe.moe_layer import expert_product
from engine.model.stage import Stage
from engine.model.vocabulary import Head
from engine.parallel.autograd_collectives import gather_sequence
from engine.parallel.collectives import Axis
from engine.parallel.mesh import World
from engine.parallel.parameters import ParameterFactory
from engine.planner.layer_split import split_layers
from engine.sampling.cache import Caches
from engine.sharding.filling import allocate
from engine.sharding.pipeline_schedules import ACTIVATIONS


class Decoder:
    """This rank's stage of a model, with caches for `batch` sequences of at most `positions` tokens.

    The constructor is a collective call. `layout` uses only pp, tp and ep, and has one stage per rank
    (`engine.sampling.settings`). `chooser` is the rank that chooses tokens.
    """

    def __init__(self, layout: Layout, world: World, meter: Meter, batch: int, positions: int):
        self.world, self._meter, self._model = world, meter, layout.model
        self.dtype = ACTIVATIONS.get(layout.train.precision, torch.get_default_dtype())
        grouped, slower = expert_product(layout.model, self.dtype, world.device, world.control)
        if slower:
            sys.stderr.write(slower + "\n")
        factory = ParameterFactory(
            layout.run.seed,
            world.tp,
            world.ep,
            world.dense["tp"],
            world.expert["ep"],
            world.ep_hops,
            device=world.device,
            deferred=True,
            grouped=grouped,
        )
        layers = split_layers(layout.model, layout.stages)[world.pp.rank]
        self.stage = Stage(factory, layout.model, layers, KnobValues.of(layout), meter)
        allocate(self.stage, world.device, self.dtype)
        self.caches = Caches([self.stage], layout.model, batch, positions, self.dtype, world.device)
        self.chooser = world.grid.rank(pp=world.grid.pp - 1)

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the weights of a checkpoint that was saved in any layout. Collective; if loading fails, all ranks raise
        RefusedError."""
        restore(checkpoint, State([self.stage], None, self.world))

    @torch.no_grad()
    def run(self, tokens_BQ: Tensor, last: bool = True) -> Tensor | None:
        """Run the model on the next tokens of each sequence. Returns the logits of the last token, [B, 1, V], or of all
        tokens, on the ranks of the last stage, and None on other ranks. Collective."""
        count, pp, tp = tokens_BQ.shape[1], self.world.pp, self.world.tp
        self._meter.start_step(self.caches.length)
        slice_ = -(-count // tp.size)
        if pp.rank == 0:
            x = F.pad(tokens_BQ, (0, slice_ * tp.size - count))
        else:
            x = torch.empty(
                len(tokens_BQ), slice_, self._model.d_model, dtype=self.dtype, device=self.world.device
            )
            pp.receive(x, pp.rank - 1)
        if self.stage.embedding is not None:
            x = self.stage.embedding(x)
        with self.caches.next(count):
            for block in self.stage.layers.values():
                x = block(x)
        if pp.rank < pp.size - 1:
            pp.send(x, pp.rank + 1)
            return None
        return self._logits(x, count, last)

    def _logits(self, x_BsD: Tensor, count: int, last: bool) -> Tensor:
        assert self.stage.norm is not None and isinstance(self.stage.head, Head)
        x_BQD = gather_sequence(self.stage.norm(x_BsD), self.world.tp)[:, count - 1 if last else 0 : count]
        return whole_vocabulary(self.stage.head.project(x_BQD), self.world.tp)


def whole_vocabulary(logits_BQv: Tensor, tp: Axis) -> Tensor:
    """All-gather the parts [B, Q, V/tp] of the tp ranks into [B, Q, V]."""
    return tp.all_gather(logits_BQv).movedim(0, 2).flatten(2)
