"""Validation: the loss on a text that the run does not train on, measured between two steps.

Validation does not affect training: it computes no gradients, draws no random numbers and changes no state, and its
meter readings are kept separate from those of the step.

Shapes: B sequences in a micro-batch, S tokens in a cp slice, s = S/tp, D model.
"""

import torch
from torch import Tensor

from engine.config.layout import Layout
from engine.config.schedule_traits import stages_of_rank
from engine.metering.meter import Meter
from engine.model.loss import cross_entropy
from engine.sharding.pipeline_schedules import ACTIVATIONS
from engine.train.batches.corpus import validation_text
from engine.train.batches.samples import Samples, check_same_corpus
from engine.train.computation import Computation


class Validation:
    """Measures the loss on the same sequences each time. The collective constructor compares the texts of all ranks."""

    def __init__(self, layout: Layout, computation: Computation, meter: Meter):
        self._layout, self._computation, self._meter = layout, computation, meter
        self._world = world = computation.world
        self._every = layout.validation.every
        # The rank of the pipeline that holds each stage.
        self._owner = {
            stage: rank
            for rank in range(world.grid.pp)
            for stage in stages_of_rank(layout.schedule.name, rank, world.grid.pp, layout.virtual_stages)
        }
        self._stages = dict(
            zip(
                (s for s, rank in sorted(self._owner.items()) if rank == world.coords["pp"]),
                computation.stages,
                strict=True,
            )
        )
        text = validation_text(layout)
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
        """Whether to measure after `done` steps. The loss is also measured after the last step of the run."""
        return self._every > 0 and (done % self._every == 0 or done == self._layout.train.steps)

    @torch.no_grad()
    def loss(self) -> float:
        """The loss per token over all sequences, equal on all ranks. Uses the averaged weights if the run keeps them.
        Collective over all ranks."""
        computation, values = self._computation, self._computation.knob_values
        recompute, values.recompute = values.recompute, "none"  # without a backward, nothing is recomputed
        try:
            with self._meter.aside():
                if computation.average:
                    with computation.average.in_use():
                        mine = self._sum()
                else:
                    mine = self._sum()
        finally:
            values.recompute = recompute
        total = float(self._world.control.all_gather(mine.double().cpu()).sum())
        return total / (self._layout.validation.sequences * self._layout.model.seq_len)

    def _sum(self) -> Tensor:
        """This rank's part of the summed loss; all tp ranks compute the same sum, so only tp rank 0 counts it."""
        computation, world = self._computation, self._world
        total = torch.zeros((), device=world.device)
        size = max(1, self._layout.local_batch // computation.pipeline.plan.micro_batches)
        computation.shards.gather()
        for tokens, targets, starts in self._sequences.split(size):
            logits = self._forward(tokens, starts)
            if logits is not None:
                total += cross_entropy(logits, targets, world.tp)
        computation.shards.release()
        return total if world.coords["tp"] == 0 else torch.zeros_like(total)

    def _forward(self, tokens_BS: Tensor, starts_BW: Tensor | None) -> Tensor | None:
        """Run a micro-batch through all stages in sequence. Returns the logits on the rank of the last stage."""
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
        return x if here == self._owner[self._layout.stages - 1] else None
