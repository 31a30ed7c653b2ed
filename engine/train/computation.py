"""Computes a training step on one rank: batch, forward and backward passes, gradient norm, optimizer update."""

import math
import sys
import time

import torch
from torch import Tensor

from agents.protocol import Event
from agents.rank.agent import Agent
from engine.config.checks.legal_values import shards_by_block
from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.learning_rate import learning_rate
from engine.config.schedule_traits import stages_of_rank
from engine.control.expert_placement import ExpertPlacement
from engine.control.vote import LEADER
from engine.data.mixture import Text
from engine.device import group_device
from engine.kernels.compiled import Compiler
from engine.metering.meter import Meter
from engine.model.loss import training_loss
from engine.model.moe.moe_layer import expert_product
from engine.model.stage import Stage
from engine.parallel.context.context_parallel import ContextParallel
from engine.parallel.mesh import World
from engine.parallel.parameters import ParameterFactory
from engine.planner.expert_placement import Map
from engine.planner.layer_split import split_layers
from engine.sharding.expert_rows import moe_layers
from engine.sharding.fsdp import POLICIES, Shards
from engine.sharding.pipeline_schedules import Pipeline
from engine.train.batches.corpus import read_text
from engine.train.batches.samples import Samples, check_same_corpus
from engine.train.optimization.expert_bias import LossFreeBalancing
from engine.train.optimization.loss_scaling import LossScaler
from engine.train.optimization.optimizer import GradientNorm, make_optimizer
from engine.train.optimization.weight_average import WeightAverage


class Computation:
    """Model stages, data, pipeline and optimizer of one rank. Each step uses the knob values that `knob_values` has
    when the step starts.

    The constructor is collective over the default process group: it creates process groups and compares the ranks'
    corpora.
    """

    def __init__(self, layout: Layout, meter: Meter, agent: Agent, corpus: Text | None):
        self._layout, self._meter, self._agent = layout, meter, agent
        grid, model, train = layout.ranks, layout.model, layout.train
        self.world = world = World(grid, meter, group_device(), layout.ep_inner, layout.tied_apart)
        if layout.run.collectives:
            world.use_measured_all_reduces(layout.run.collectives)
        self.knob_values = KnobValues.of(layout)
        context = ContextParallel(
            world.cp, world.sequence, layout.grid.cp_method, layout.data.reset_positions
        )
        dtype = POLICIES[train.precision].param_dtype or torch.get_default_dtype()
        grouped, slower = expert_product(model, dtype, world.device, world.control)
        if slower:
            sys.stderr.write(slower + "\n")
            agent.send(Event(time.time(), "warning", "engine", slower))
        weights = ParameterFactory(
            layout.run.seed,
            world.tp,
            world.ep,
            world.dense["tp"],
            world.expert["ep"],
            world.ep_hops,
            context,
            world.device,
            Compiler(train.compile),
            deferred=True,
            grouped=grouped,
        )
        layers = split_layers(model, layout.stages)
        stage_numbers = stages_of_rank(
            layout.schedule.name, world.coords["pp"], grid.pp, layout.virtual_stages
        )
        self.stages = [Stage(weights, model, layers[n], self.knob_values, meter) for n in stage_numbers]
        self.layers = [layer for n in stage_numbers for layer in layers[n]]
        self.has_head = layout.stages - 1 in stage_numbers
        by_block = shards_by_block(layout)
        self.shards = Shards(
            self.stages, world, train.zero, by_block, train.precision, weights.unfilled, layout.run.seed
        )
        self.corpus = read_text(layout) if corpus is None else corpus
        check_same_corpus(self.corpus, layout.data.source, world.control)
        self.positions = positions = context.positions(model.seq_len)
        sizes = model.seq_len, train.global_batch
        self.samples = Samples(
            self.corpus,
            *sizes,
            layout.run.seed,
            positions,
            world.device,
            layout.data.prefetch,
            layout.data.separate_documents,
            model.mtp_layers,
        )
        self._epochs: dict[int, int] = {}  # index of a source in data.shards -> its latest epoch
        self.pipeline = Pipeline(layout, self.stages, self.shards, world, meter, self._loss_of)
        self.optimizer = make_optimizer(self.stages, train)
        self.average = None if train.ema is None else WeightAverage(self.stages, self.optimizer, train.ema)
        self.norm = GradientNorm(self.stages, world)
        self.loss_scaler = LossScaler(layout.loss_scale if train.precision == "fp16" else None)
        self.balancing = LossFreeBalancing(self.stages, world)
        self.expert_placement: ExpertPlacement | None = None
        if grid.ep > 1:
            self.expert_placement = ExpertPlacement(
                self.stages, self.optimizer, world, self.shards.compression
            )

    @property
    def experts_moved(self) -> bool:
        """Whether experts were moved between ranks at the start of the last step; the result is equal on all ranks."""
        return self.expert_placement is not None and self.expert_placement.moved

    @property
    def placement(self) -> dict[int, Map]:
        """The expert placement of each MoE layer on this rank, by layer number: which expert each slot holds."""
        return {number: layer.placement.logical for number, layer in moe_layers(self.stages).items()}

    def learning_rate(self, step: int) -> float:
        return learning_rate(self._layout.train, step, self.knob_values.lr_scale)

    def forward_backward(self, step: int) -> Tensor:
        """Run all micro-batches of a step and return this rank's loss. Afterwards the gradients are complete and not
        yet clipped. If an expert placement has been requested, the experts are moved first.
        """
        if self.expert_placement:
            with self._meter.phase("expert placement"):
                event = self.expert_placement.carry_out()
            if event and self.world.rank == LEADER:
                self._agent.send(event)
        with self._meter.phase("data"):
            first = self.world.coords["dp"] * self._layout.local_batch
            sequences = self.samples.batch(step, first, self._layout.local_batch)
        if self.world.rank == LEADER:
            self._report_epochs(step)
        self.knob_values.loss_scale = scale = self.loss_scaler.scale
        self.shards.compression.begin(step, self.knob_values.compression, scale)
        self.shards.gather()
        loss = self.pipeline.plan.run(sequences)
        with self._meter.phase("reduce"):
            self.shards.complete()
            self.loss_scaler.unscale(self.norm.gradients())
        return loss if scale == 1.0 else loss / scale

    def _rescale(self, step: int, norm: float) -> None:
        """Adapt the loss scale, and report a skipped step. With fp16, skipped steps are normal, so the event is a
        warning instead of an error.
        """
        finite = math.isfinite(norm)
        change = self.loss_scaler.update(finite)
        if finite or self.world.rank != LEADER:
            return
        text = f"step {step}: the gradient norm is {norm}, so the weights stay unchanged"
        if change:
            text = f"step {step}: a gradient overflowed in fp16, so the weights stay unchanged; {change}"
        self._agent.send(Event(time.time(), "warning" if change else "error", "engine", text))

    def _report_epochs(self, step: int) -> None:
        """Send an event for each folder of token shards in which a new epoch begins in this step."""
        for source, lowest, highest in self.samples.epochs:
            before = self._epochs.get(source, lowest)
            if highest > before and self._layout.data.shards:
                folder = self._layout.data.shards[source]
                text = f"step {step}: epoch {highest + 1} of {folder} begins: its samples are repeated"
                self._agent.send(Event(time.time(), "info", "engine", text))
            self._epochs[source] = max(before, highest)

    def _loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum of cross-entropies divided by the number of tokens in the global batch. The loss is not normalised
        anywhere else."""
        # The corpus has no padding, so all tokens count.
        tokens = self._layout.train.global_batch * self._layout.model.seq_len
        scale = self.knob_values.loss_scale / tokens
        return training_loss(logits, targets, self.world.tp, scale, self._layout.train.mtp_weight)

    def counted_loss(self, loss: Tensor) -> float:
        """This rank's term of the job's loss, which is a sum over all ranks. The term is 0 on all tp ranks except tp
        rank 0, because all tp ranks compute the same loss."""
        return float(loss) if self.world.coords["tp"] == 0 else 0.0

    def gradient_norm(self) -> float:
        """Norm of the whole model's gradient before clipping. The host waits for the device here, once per step."""
        with self._meter.phase("optimizer"):
            norm = float(self.norm())
            self._meter.settle()
        return norm

    def update(self, step: int, norm: float) -> None:
        """Clip the gradient, whose norm is `norm`, and run the optimizer step.

        If `norm` is not finite, leave weights and biases unchanged. `norm` is equal on all ranks.
        """
        with self._meter.phase("optimizer"):
            if math.isfinite(norm):
                if self.knob_values.grad_clip is not None:
                    self.norm.clip(norm, self.knob_values.grad_clip)
                for group in self.optimizer.param_groups:
                    group["lr"] = self.learning_rate(step)
                self.optimizer.step()
                if self.average:
                    self.average.update()
                self.balancing(self._meter.readings.load)
            self._rescale(step, norm)
            self.optimizer.zero_grad()
        self.shards.compression.settle(math.isfinite(norm))
        if self.expert_placement:
            self.expert_placement.record_load(self._meter.readings.load)
