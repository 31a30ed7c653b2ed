"""Runs sequences forward through all pipeline stages, one stage after another, without a schedule and without a
backward pass.

These passes run between two training steps, for validation and for text generation.

Shapes: B sequences in a micro-batch, S tokens in a cp slice, s = S/tp, D model width, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config.layout import Layout
from engine.config.schedule_traits import stages_of_rank
from engine.model.stage import Stage
from engine.parallel.mesh import World
from engine.sharding.pipeline_schedules import ACTIVATIONS


class ForwardOnly:
    """Runs forward passes without backward passes over all stages of a model. `stages` are the stages of this rank, in
    order."""

    def __init__(self, layout: Layout, stages: Sequence[Stage], world: World):
        self._layout, self._world = layout, world
        # The rank of the pipeline that holds each stage.
        self._owner = {
            stage: rank
            for rank in range(world.grid.pp)
            for stage in stages_of_rank(layout.schedule.name, rank, world.grid.pp, layout.virtual_stages)
        }
        numbers = (stage for stage, rank in sorted(self._owner.items()) if rank == world.coords["pp"])
        self._stages = dict(zip(numbers, stages, strict=True))

    @property
    def last(self) -> int:
        """The pipeline rank that holds the last stage."""
        return self._owner[self._layout.stages - 1]

    @torch.no_grad()
    def run(self, tokens_BS: Tensor, starts_BW: Tensor | None = None) -> Tensor | None:
        """The logits [B, S, V/tp] of a micro-batch on the ranks of the last stage, and None on other ranks. Collective
        over the ranks of a pipeline."""
        world, here = self._world, self._world.coords["pp"]
        x: Tensor | None = tokens_BS
        for stage in range(self._layout.stages):
            owner, before = self._owner[stage], self._owner.get(stage - 1)
            if stage and before != owner:
                if here == before:
                    assert x is not None
                    world.pp.send(x, owner)
                elif here == owner and before is not None:
                    shape = (len(tokens_BS), tokens_BS.shape[1] // world.tp.size, self._layout.model.d_model)
                    x = torch.empty(
                        shape, dtype=ACTIVATIONS.get(self._layout.train.precision), device=world.device
                    )
                    world.pp.receive(x, before)
            if here == owner:
                x = self._stages[stage](x, starts_BW)
        return x if here == self.last else None
