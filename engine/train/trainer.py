"""The training loop of one rank: data, pipeline, reduction, update, agreement, record."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor

from agents.protocol import CHECKPOINT_STEP, PAUSED, Ack, Event, Facts, Step, Summary
from agents.rank.agent import Agent
from engine.checkpoint.folders import Checkpoint, Manifest, read
from engine.checkpoint.resume import other_data
from engine.checkpoint.save import Checkpoints, SaveAcks, Saved, restore
from engine.checkpoint.state import State
from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.legal_values import shards_by_block
from engine.config.refusal import LayoutError
from engine.config.schedule_traits import stages_of_rank
from engine.control.actions import Profiler, RunActions
from engine.control.expert_placement import ExpertPlacement
from engine.control.knobs import make_board
from engine.control.preview import Previewer
from engine.control.vote import LEADER, KnobVote
from engine.device import group_device
from engine.kernels.compiled import Compiler
from engine.metering.meter import Meter
from engine.model.loss import cross_entropy
from engine.model.transformer import Stage
from engine.parallel.context_parallel import ContextParallel
from engine.parallel.mesh import World
from engine.parallel.parameters import ParameterFactory
from engine.planner.layer_split import split_layers
from engine.rendezvous import usable_cores
from engine.sharding.fsdp import Shards
from engine.sharding.pipeline import Pipeline
from engine.telemetry.hello import hello, knob_board
from engine.telemetry.idle_time import IdleTimes
from engine.telemetry.records import StepRecords
from engine.telemetry.step_summary import Known, Measured, StepSummaries
from engine.train.corpus import Corpus, read_corpus
from engine.train.data import Samples, agree_on_corpus
from engine.train.expert_bias import Balancing
from engine.train.optimizer import GradientNorm, learning_rate, make_optimizer

BEAT_S = 0.25  # between two agreements of a paused run
LOOK_S = 0.02
LOADS_EVERY_S = 0.05  # at least, between two words on the experts' load: nobody reads faster


class Trainer:
    """One rank's run. Needs an initialised default process group of the layout's world; over NCCL it computes on this
    process's current GPU, else on the CPU.

    `on_step` gets this rank's own record after each of its steps; `on_summary`, on rank 0, each step of the whole job,
    one step late; `on_checkpoint`, on rank 0, the result of each save. Each of them may call `stop`.
    `stop_requested` is polled at each step; only its result on rank 0 counts. `local_world` is the number of ranks on
    this machine (default: all). Without `checkpoints_dir` the trainer saves nothing; without `traces` (a folder) it
    profiles nothing. `resume` is the folder of a checkpoint to continue from; `layout` then has the knob values of that
    checkpoint, and `given` is the layout as the user wrote it (`engine.checkpoint.resume`).
    """

    def __init__(
        self,
        layout: Layout,
        meter: Meter | None = None,
        agent: Agent | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        *,
        on_step: Callable[[Step], None] = lambda _: None,
        on_summary: Callable[[Summary], None] = lambda _: None,
        on_checkpoint: Callable[[Saved], None] = lambda _: None,
        local_world: int | None = None,
        corpus: Corpus | None = None,
        checkpoints_dir: Path | None = None,
        resume: Path | None = None,
        given: Layout | None = None,
        traces: Path | None = None,
    ):
        if meter is None:
            experts = layout.model.moe.experts if layout.model.moe else 0
            meter = Meter(layout.model.layers, experts, device=group_device())
        if agent is None:
            agent = Agent(None, lambda: meter.doing)
        self.layout, self.meter, self.agent = layout, meter, agent
        self._stop_requested, self._on_step, self._on_summary = stop_requested, on_step, on_summary
        self._on_checkpoint, self._given = on_checkpoint, given or layout
        self._stopping, self._began_s = False, time.time()
        self._loads_told_s = 0.0
        grid, model, train = layout.ranks, layout.model, layout.train
        self.world = world = World(grid, meter, group_device(), layout.ep_inner, layout.tied_apart)
        self.knob_values = KnobValues.of(layout)
        context = ContextParallel(world.cp, world.sequence, layout.grid.cp_method)
        meshes = world.dense["tp"], world.expert["ep"]
        weights = ParameterFactory(
            layout.run.seed,
            world.tp,
            world.ep,
            *meshes,
            world.ep_hops,
            context,
            world.device,
            Compiler(train.compile),
        )
        layers = split_layers(model, layout.stages)
        mine = stages_of_rank(layout.schedule.name, world.at["pp"], grid.pp, layout.virtual_stages)
        self.stages = [Stage(weights, model, layers[stage], self.knob_values, meter) for stage in mine]
        self.shards = Shards(self.stages, world, train.zero, shards_by_block(layout), train.precision)
        self._corpus = corpus = read_corpus(layout) if corpus is None else corpus
        agree_on_corpus(corpus, layout.data.source, world.control)
        positions = context.positions(model.seq_len)
        sizes = model.seq_len, train.global_batch
        self.samples = Samples(corpus, *sizes, layout.run.seed, positions, world.device)
        self.pipeline = Pipeline(layout, self.stages, self.shards, world, meter, self._loss_of)
        self.optimizer = make_optimizer(self.stages, train)
        self.norm = GradientNorm(self.stages, world)
        self.balancing = Balancing(self.stages, world)
        self.expert_placement = ExpertPlacement(self.stages, self.optimizer, world) if grid.ep > 1 else None
        self.checkpoints: Checkpoints | None = None
        if checkpoints_dir:
            state = State(self.stages, self.optimizer, world)
            self.checkpoints = Checkpoints(
                checkpoints_dir, layout.checkpoint, state, self._manifest, meter.at
            )
        save = self.checkpoints.request if self.checkpoints else None
        self._save_acks = SaveAcks(self.checkpoints, agent.settle) if self.checkpoints else None
        self.controls = RunActions()
        self.profiler = Profiler(traces, world.rank, grid.world, world.device) if traces else None
        actions = [*self.controls.knobs(), *(self.profiler.knobs() if self.profiler else ())]
        self.board = make_board(
            layout, self.pipeline, self.shards, self.knob_values, self.expert_placement, save, actions
        )
        self.switch = KnobVote(world.control, self.board, lambda: agent.pending, self._settle)
        self.oversubscribed = (local_world or grid.world) > usable_cores()
        self.idle_times = IdleTimes(world)
        self._statistics = StepSummaries(layout, world, self.oversubscribed)
        held = [layer for stage in mine for layer in layers[stage]]
        self._records = StepRecords(layout, world, held, head=layout.stages - 1 in mine)
        self.previewer: Previewer | None = None
        if world.rank == LEADER:
            self.previewer = Previewer(layout, self.board, self.oversubscribed)
            agent.preview(self.previewer)
        self.first_step = 0
        if resume:
            self._resume(read(resume))
        self._introduce(self.first_step)

    def stop(self) -> None:
        """Ask that the run ends after this step or the next, on all ranks alike; rank 0's word counts."""
        self._stopping = True

    def run(self) -> Summary | None:
        """Train to the end or until asked to stop; the last summary, on rank 0."""
        for step in range(self.first_step, self.layout.train.steps):
            if self.train_step(step) or self.hold(step):
                break
        return self.close()

    def close(self) -> Summary | None:
        """Wait for everything that is under way: the last step's summary (returned, on rank 0), traces, saves.

        Every rank calls it, before the process group is destroyed: gloo aborts a process that destroys a group with a
        collective under way. A second call does nothing.
        """
        summary = self._publish()
        if self.profiler:
            self.profiler.end()
            self.profiler.wait()
        if self.checkpoints:
            self.checkpoints.wait()
        self._tell_saved()
        return summary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:  # after an error other ranks may never come, and the wait for them would hide it
            self.close()

    def hold(self, step: int) -> bool:
        """After `step`, as long as the run is paused; True when it shall stop.

        The ranks agree again and again, as at the end of a step: so commands are heard, and no collective waits for
        longer than a moment.
        """
        if not self.controls.paused:
            return False
        self._publish()
        stop = False
        with self.meter.holding(PAUSED):
            while self.controls.paused and not stop:
                self._tell_saved()
                if self.world.rank == LEADER:
                    self._await_word()
                self.meter.at(PAUSED)
                self.switch.begin(step, self._shall_stop)
                stop = self.switch.end(step) or self.controls.stopping
                if (
                    self.checkpoints
                    and (self.checkpoints.requested or stop)
                    and self.checkpoints.due(step + 1, last=stop)
                ):
                    self.checkpoints.save(step + 1)
        return stop

    @property
    def _shall_stop(self) -> bool:
        return self._stopping or self._stop_requested()

    def _await_word(self) -> None:
        """On the leader of a paused run: until there is something to tell the others, or it is time for a beat."""
        beat = time.monotonic() + BEAT_S
        while time.monotonic() < beat and not self.agent.pending and not self._shall_stop:
            time.sleep(LOOK_S)

    def forward_backward(self, step: int) -> Tensor:
        """All micro-batches of a step; gradients are complete and unclipped after it. This rank's loss."""
        if self.expert_placement:
            with self.meter.phase("expert placement"):
                event = self.expert_placement.carry_out()
            if event and self.world.rank == LEADER:
                self.agent.send(event)
        with self.meter.phase("data"):
            at = self.world.at["dp"] * self.layout.local_batch
            tokens, targets = self.samples.batch(step, at, self.layout.local_batch)
        self.shards.gather()
        loss = self.pipeline.plan.run(tokens, targets)
        with self.meter.phase("reduce"):
            self.shards.complete()
        return loss

    def gradient_norm(self) -> float:
        """Of the whole model, before clipping. The host waits for the device here, once a step."""
        with self.meter.phase("optimizer"):
            norm = float(self.norm())
            self.meter.settle()
        return norm

    def update(self, step: int, norm: float) -> None:
        """Clip by the gradient's `norm` and step the optimizer.

        Where it is not finite, on every rank alike, nothing is updated: weights and biases stay as they are.
        """
        train = self.layout.train
        with self.meter.phase("optimizer"):
            if math.isfinite(norm):
                if self.knob_values.grad_clip is not None:
                    self.norm.clip(norm, self.knob_values.grad_clip)
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate(train, step, self.knob_values.lr_scale)
                self.optimizer.step()
                self.balancing(self.meter.readings.load)
            elif self.world.rank == LEADER:
                text = f"step {step}: the gradient norm is {norm}, so the weights were left as they are"
                self.agent.send(Event(time.time(), "error", "engine", text))
            self.optimizer.zero_grad()
        if self.expert_placement:
            self.expert_placement.note(self.meter.readings.load)

    def train_step(self, step: int) -> bool:
        """One step with its agreement and its records. True when the run shall stop after it."""
        start = time.perf_counter()
        if self.profiler:
            if self.profiler.due:
                self._publish()  # a trace neither begins nor ends with a collective under way
            self.profiler.start_step(step)
        self.meter.start_step(step)
        known = Known(
            step,
            self.board.revision,
            self.board.values,
            learning_rate(self.layout.train, step, self.knob_values.lr_scale),
            time.time(),
        )
        last = step + 1 == self.layout.train.steps
        self.switch.begin(step, last or self._shall_stop)
        clock = self.pipeline.plan.clock
        loss = self.counted(self.forward_backward(step))  # before the update, for which nobody need wait
        norm = self.gradient_norm()
        self.idle_times.tell(self.meter.readings, clock)
        self.update(step, norm)
        with self.meter.phase("agree"):
            self._publish()
            self._tell_saved()
            stop = self.switch.end(step) or self.controls.stopping
            idle = self.idle_times.split()
        if self.checkpoints and self.checkpoints.due(step + 1, last=stop):
            with self.meter.phase("checkpoint"):
                self.checkpoints.save(step + 1)
        measured = Measured(loss, norm, time.perf_counter() - start, idle)
        record = self._record(measured, known)
        if self.previewer:
            self.previewer.note_rank(record, clock, self.idle_times.durations)
        if self.profiler:
            self.profiler.end_step(step)
        self._statistics.gather(self.meter.readings, measured, known)  # under way until the next step's end
        return stop

    def _loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum of cross-entropies over the global count of tokens: normalised here and nowhere else."""
        tokens = (
            self.layout.train.global_batch * self.layout.model.seq_len
        )  # all valid: a corpus has no padding
        return cross_entropy(logits, targets, self.world.tp) / tokens

    def counted(self, loss: Tensor) -> float:
        """Each tensor rank of the last stage computed the same loss: it counts once."""
        return float(loss) if self.world.at["tp"] == 0 else 0.0

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Go on from `checkpoint`; the knobs have its values already, from the layout."""
        manifest = checkpoint.manifest
        if refusal := other_data(checkpoint, self.layout, self._corpus.digest):
            raise LayoutError(refusal)
        restore(checkpoint, State(self.stages, self.optimizer, self.world))
        self.first_step, self.board.revision = manifest.step, manifest.revision
        self.switch.history += manifest.history
        if self.world.rank == LEADER:
            text = f"resumed from {checkpoint.folder}, at revision {manifest.revision} of the knobs"
            self.agent.send(Event(time.time(), "info", "engine", text, {CHECKPOINT_STEP: manifest.step}))

    def _manifest(self, done: int) -> Manifest:
        return Manifest(
            step=done,
            run=self.layout.run.name,
            layout=self._given,
            data=self._corpus.digest,
            knobs=self.board.values,
            revision=self.board.revision,
            history=list(self.switch.history),
            torch=str(torch.__version__),
        )

    def _tell_saved(self) -> None:
        """What became of checkpoints, on rank 0; and of traces, each rank of its own."""
        for traced in self.profiler.take_finished() if self.profiler else ():
            grave: Literal["info", "error"] = "error" if traced.why else "info"
            self.agent.send(Event(time.time(), grave, "engine", str(traced)))
        for saved in self.checkpoints.take_finished() if self.checkpoints else ():
            if self.world.rank == LEADER:
                self._on_checkpoint(saved)
                level: Literal["info", "error"] = "error" if saved.why else "info"
                facts: Facts = {} if saved.why else {CHECKPOINT_STEP: saved.step}
                self.agent.send(Event(time.time(), level, "engine", str(saved), facts))
        if self._save_acks:
            self._save_acks.tell()

    def _settle(self, ack: Ack) -> None:
        if ack.state == "applied":
            self._introduce(ack.step)  # before the ack, so that watchers see the new board first
            changes = self.switch.history[-1].changes
            if self._save_acks and "save" in changes:
                self._save_acks.hold(ack, changes)
                return
        self.agent.settle(ack)

    def _introduce(self, step: int) -> None:
        board = knob_board(self.board) if self.world.rank == LEADER else None
        rank = hello(self.layout, self.world, self.board, self.oversubscribed, step, self._began_s)
        self.agent.introduce(rank, board)

    def _publish(self) -> Summary | None:
        """Pass on the summary of the step before, on rank 0."""
        collected = self._statistics.collect()
        if collected is None:
            return None
        summary = collected.summary
        if self.previewer:
            self.previewer.note(summary)
        self._on_summary(summary)
        self.agent.send(summary)
        if self.agent.attached and self.layout.model.moe:
            if time.monotonic() - self._loads_told_s >= LOADS_EVERY_S:
                self._loads_told_s = time.monotonic()
                self.agent.send(collected.loads())
            if self.agent.wants("experts", summary.step):
                self.agent.send(collected.experts())
        return summary

    def _record(self, measured: Measured, known: Known) -> Step:
        """This rank's own record of the step."""
        readings = self.meter.readings
        record = self._records.step(readings, measured, known)
        self.agent.send(record)
        self._on_step(record)
        one_per_stage = not any(self.world.at[axis] for axis in ("dp", "cp", "tp"))
        if readings.a2a_to and self.agent.wants("peers", known.step):
            self.agent.send(self._records.peers(readings, known.step))
        if one_per_stage and self.agent.wants("timeline", known.step):
            self.agent.send(self._records.timeline(readings, known.step))
        return record
