"""Validation: the loss on text that the run does not train on, measured between two steps.

Validation does not affect training: it computes no gradients, draws no random numbers and changes no state. The bytes
and times that the meter measures during validation are not added to those of the step.
"""

import torch
from torch import Tensor

from engine.config.layout import Layout
from engine.data.mixture import Text
from engine.metering.meter import Meter
from engine.model.loss import cross_entropy
from engine.sharding.forward_only import ForwardOnly
from engine.train.batches.corpus import validation_text
from engine.train.batches.samples import Samples, check_same_corpus
from engine.train.computation import Computation
from engine.train.evaluation import evaluation


class Validation:
    """Measures the validation loss, each time on the same sequences. The constructor is collective: it checks that all
    ranks have read the same validation text. `text`: the validation text; None: it is read here."""

    def __init__(self, layout: Layout, computation: Computation, meter: Meter, text: Text | None = None):
        self._layout, self._computation, self._meter = layout, computation, meter
        self._world = world = computation.world
        self._every = layout.validation.every
        self._forward = ForwardOnly(layout, computation.stages, world)
        text = text or validation_text(layout)
        if text is None:
            return
        check_same_corpus(text, layout.validation.source, world.control)
        count = layout.validation.sequences // layout.ranks.dp
        samples = Samples(
            text,
            layout.model.seq_len,
            layout.validation.sequences,
            layout.run.seed,
            computation.positions,
            world.device,
            documents=layout.data.separate_documents,
        )
        self._sequences = samples.batch(0, world.coords["dp"] * count, count)

    def due(self, done: int) -> bool:
        """Whether to measure the validation loss after `done` steps: every `validation.every` steps and after the run's
        last step."""
        return self._every > 0 and (done % self._every == 0 or done == self._layout.train.steps)

    def loss(self, capacity_factor: float | None) -> float:
        """The loss per token over all sequences, equal on all ranks, with the `capacity_factor` of the step that it is
        recorded for: the ranks may already have agreed on another for the next step. Uses the averaged weights if the
        run keeps them. Collective over all ranks."""
        with evaluation(self._computation, self._meter, capacity_factor=capacity_factor):
            mine = self._sum()
        total = float(self._world.all_ranks.all_reduce(mine.double()))
        return total / (self._layout.validation.sequences * self._layout.model.seq_len)

    def _sum(self) -> Tensor:
        """This rank's part of the summed loss; all tp ranks compute the same sum, so only tp rank 0 counts it."""
        computation, world = self._computation, self._world
        total = torch.zeros((), device=world.device)
        size = max(1, self._layout.local_batch // computation.pipeline.plan.micro_batches)
        for tokens, targets, starts in self._sequences.split(size):
            logits = self._forward.run(tokens, starts)
            if logits is not None:
                total += cross_entropy(logits, targets, world.tp)
        return total if world.coords["tp"] == 0 else torch.zeros_like(total)
