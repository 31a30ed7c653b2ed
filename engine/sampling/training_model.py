"""Runs the model of a live training run with attention caches, in order to generate text. Works in every layout.
Replicas and cp ranks all run the same tokens: each cp rank runs the whole sequence, because a few tokens cannot be
split over cp as in training. The tokens of a pass are padded to a multiple of tp.

Shapes: B sequences, Q new tokens, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.config.layout import Layout
from engine.model.stage import Stage
from engine.parallel.mesh import World
from engine.sampling.cache import Caches
from engine.sampling.decoder import whole_vocabulary
from engine.sharding.forward_only import ForwardOnly
from engine.sharding.pipeline_schedules import ACTIVATIONS


class TrainingModel:
    """The stages of this rank, with caches for one sequence of at most `positions` tokens. `chooser` is the rank that
    chooses tokens. The caller must gather the weights first, as it does for a training step."""

    def __init__(self, layout: Layout, stages: list[Stage], world: World, positions: int):
        self.world = world
        self._forward = ForwardOnly(layout, stages, world)
        self.chooser = world.grid.rank(pp=self._forward.last)
        dtype = ACTIVATIONS.get(layout.train.precision, torch.get_default_dtype())
        self.caches = Caches(stages, layout.model, 1, positions, dtype, world.device)

    def run(self, tokens_BQ: Tensor) -> Tensor | None:
        """Run the model on the next tokens. Returns the logits of the last token, [B, 1, V], on the ranks of the last
        stage, and None on other ranks. Collective over all ranks."""
        count, tp = tokens_BQ.shape[1], self.world.tp
        with self.caches.next(count):
            logits_BQv = self._forward.run(F.pad(tokens_BQ, (0, -count % tp.size)))
        return None if logits_BQv is None else whole_vocabulary(logits_BQv[:, count - 1 : count], tp)
