"""The training loop of one rank: compute a step, vote on knob changes, save, report."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from agents.protocol import PAUSED, Step, Summary
from agents.rank.agent import Agent
from engine.checkpoint.save import Saved
from engine.config.layout import Layout
from engine.data.mixture import Text
from engine.device import group_device
from engine.metering.meter import Meter
from engine.rendezvous import usable_cores
from engine.telemetry.step_summary import Measured, StepConditions
from engine.train.computation import Computation
from engine.train.reporting import Reporting
from engine.train.saving import Saving
from engine.train.steering import Steering
from engine.train.text_samples import TextSample, TextSamples
from engine.train.validation import Validation


class Trainer:
    """Trains the model that `layout` describes, as one rank of the run. The default process group must be initialised
    and have as many ranks as the layout. If the group uses NCCL, the trainer computes on this process's current GPU,
    else on the CPU.

    - `on_step`: called after each step with this rank's record of the step.
    - `on_summary`: called on rank 0 with the summary of each step of the whole job, one step late.
    - `on_checkpoint`: called on rank 0 with the result of each save.
    - `on_sample`: called on rank 0 with each sample of text that the model generates. All four callbacks may call
      `stop`.
    - `stop_requested`, `save_requested`: polled at each step; only the result on rank 0 has an effect. A requested
      stop also requests a checkpoint.
    - `corpus`, `validation_corpus`: the training text and the validation text; None: the trainer reads them.
    - `local_world`: the number of ranks on this machine (default: all).
    - `checkpoints_dir`: the folder for checkpoints; None: the trainer saves nothing.
    - `traces`: the folder for profiles; None: the trainer profiles nothing.
    - `restarts`: how often the launcher has restarted the ranks of this run; None: the launcher cannot restart them, so
      the layout of the run cannot change.
    - `earlier_s`: seconds since the first start of the ranks, if the launcher has restarted them.
    - `resume`: the folder of a checkpoint to continue from. If `resume` is given, `layout` must have the checkpoint's
      knob values, and `given` must be the layout as the user wrote it (`engine.checkpoint.resume_point`).
    """

    def __init__(
        self,
        layout: Layout,
        meter: Meter | None = None,
        agent: Agent | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        *,
        save_requested: Callable[[], bool] = lambda: False,
        on_step: Callable[[Step], None] = lambda _: None,
        on_summary: Callable[[Summary], None] = lambda _: None,
        on_checkpoint: Callable[[Saved], None] = lambda _: None,
        on_sample: Callable[[TextSample], None] = lambda _: None,
        local_world: int | None = None,
        corpus: Text | None = None,
        validation_corpus: Text | None = None,
        checkpoints_dir: Path | None = None,
        resume: Path | None = None,
        given: Layout | None = None,
        traces: Path | None = None,
        restarts: int | None = None,
        earlier_s: float = 0.0,
    ):
        began_s = time.time()
        if meter is None:
            experts = layout.model.moe.experts if layout.model.moe else 0
            meter = Meter(layout.model.prediction_layers.stop, experts, device=group_device())
        if agent is None:
            agent = Agent(None, lambda: meter.operation)
        self.layout, self.meter, self.agent = layout, meter, agent
        self._stop_requested, self._stopping = stop_requested, False
        self._save_requested = save_requested
        oversubscribed = (local_world or layout.ranks.world) > usable_cores()

        self.computation = Computation(layout, meter, agent, corpus)
        self.validation = Validation(layout, self.computation, meter, validation_corpus)
        self.text_samples = TextSamples(layout, self.computation, meter, agent, on_sample)
        self.saving = Saving(
            layout,
            given or layout,
            self.computation,
            meter,
            agent,
            checkpoints_dir,
            lambda: self.steering.knob_state,
            on_checkpoint,
        )
        self.steering = Steering(
            layout, self.computation, agent, self.saving, traces, oversubscribed, began_s, restarts, earlier_s
        )
        self.reporting = Reporting(
            layout,
            self.computation,
            meter,
            agent,
            self.steering.previewer,
            oversubscribed,
            on_step,
            on_summary,
        )
        self.world, self.knob_values = self.computation.world, self.computation.knob_values
        self.stages, self.optimizer = self.computation.stages, self.computation.optimizer
        self.board = self.steering.board

        self.first_step = 0
        if resume:
            manifest = self.saving.restore(resume)
            self.first_step = manifest.step
            self.steering.continue_from(manifest)
        self.steering.introduce(self.first_step)

    def run(self) -> Summary | None:
        """Train until the last step, or until the run must stop or must continue in another layout. Returns the last
        summary on rank 0, None on other ranks."""
        for step in range(self.first_step, self.layout.train.steps):
            if self.train_step(step) or self.hold(step) or self.steering.leaves(step):
                break
        return self.close()

    def train_step(self, step: int) -> bool:
        """Train one step, vote with the other ranks on a pending change of knobs, save a checkpoint if one is due, and
        report. Returns whether the run must stop after this step; the result is the same on every rank."""
        start = time.perf_counter()
        computation, vote, profiler = self.computation, self.steering.vote, self.steering.profiler
        if profiler:
            if profiler.due(step):
                self.reporting.publish()  # a trace must not start or end while a collective runs
            profiler.start_step(step)
        self.meter.start_step(step)
        revision, knobs = self.board.revision, self.board.values
        scaler, capacity_factor = computation.loss_scaler, self.knob_values.capacity_factor
        conditions = StepConditions(
            step,
            revision,
            knobs,
            computation.learning_rate(step),
            time.time(),
            loss_scale=scaler.scale if scaler.settings else None,
            skipped_steps=scaler.skipped,
        )
        last, stopped = step + 1 == self.layout.train.steps, self._stop_requested()
        vote.begin(step, last or self._stopping or stopped, self._save_requested() or stopped)

        clock = computation.pipeline.plan.clock
        # Read the loss before the update: this waits for the device, and the update then runs asynchronously.
        loss = computation.counted_loss(computation.forward_backward(step))
        if computation.experts_moved:
            self.steering.introduce(step)
        norm = computation.gradient_norm()
        self.reporting.idle_times.send(self.meter.readings, clock)
        computation.update(step, norm)

        with self.meter.phase("agree"):
            self.reporting.publish()
            self._report_files()
            stop = vote.end(step) or self.steering.run_actions.stopping
            self.saving.request(vote.save)
            idle = self.reporting.idle_times.split()
        self.saving.save_if_due(step + 1, last=stop)
        if self.validation.due(step + 1):
            with self.meter.phase("validation"):
                conditions = replace(conditions, validation_loss=self.validation.loss(capacity_factor))
        if self.text_samples.due(step + 1):
            with self.meter.phase("sample"):
                self.text_samples.generate(step)

        measured = Measured(loss, norm, time.perf_counter() - start, idle)
        self.reporting.step(measured, conditions, clock)
        if profiler:
            profiler.end_step(step)
        self.reporting.start_summary(measured, conditions)
        if self.saving.copied:
            # A run that resumes from the checkpoint does not report this step again.
            self.reporting.publish()
            self.saving.write()
        return stop

    def hold(self, step: int) -> bool:
        """Wait after `step` while the run is paused. Returns whether the run must stop.

        During the pause, the ranks vote every `engine.train.steering.PAUSED_VOTE_S` seconds, so that commands still
        take effect and no collective waits long enough to time out.
        """
        steering = self.steering
        if not steering.run_actions.paused:
            return False
        self.reporting.publish()
        stop = False
        with self.meter.overriding_operation(PAUSED):
            while steering.run_actions.paused and not stop:
                self._report_files()
                steering.wait_paused(lambda: self._stopping or self._stop_requested())
                self.meter.set_operation(PAUSED)
                stopped = self._stop_requested()
                steering.vote.begin(step, self._stopping or stopped, self._save_requested() or stopped)
                stop = steering.vote.end(step) or steering.run_actions.stopping
                self.saving.request(steering.vote.save)
                self.saving.save_while_paused(step + 1, last=stop)
        return stop

    def stop(self) -> None:
        """Request that all ranks end the run after this step or the next. Only a request on rank 0 has an effect."""
        self._stopping = True

    def close(self) -> Summary | None:
        """Complete the last step's summary, and finish the traces and saves in progress. Returns the summary on rank 0.

        All ranks must call this before they destroy the process group: gloo aborts a process that destroys a group
        while a collective runs. A second call does nothing.
        """
        summary = self.reporting.publish()
        self.computation.samples.close()
        self.steering.end_traces()
        self.saving.wait()
        self._report_files()
        return summary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # After an error, do not wait for other ranks, because this could hang and hide the error.
        if error is None:
            self.close()

    def _report_files(self) -> None:
        self.steering.report_traces()
        self.saving.report()
