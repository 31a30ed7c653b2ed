"""Reports the measurements of one rank: step records, job summaries, expert load, pipeline idle time."""

import time
from collections.abc import Callable

from agents.protocol import Step, Summary
from agents.rank.agent import Agent
from engine.config.layout import Layout
from engine.control.preview.previewer import Previewer
from engine.metering.meter import Meter
from engine.planner.schedule import ScheduleClock
from engine.telemetry.idle_time import IdleTimes
from engine.telemetry.records import StepRecords
from engine.telemetry.step_summary import Measured, StepConditions, StepSummaries
from engine.train.computation import Computation

LOADS_EVERY_S = 0.05  # minimum time between two messages about the load of the experts


class Reporting:
    """Passes the records and summaries of steps to the agent, the callbacks and the previewer."""

    def __init__(
        self,
        layout: Layout,
        computation: Computation,
        meter: Meter,
        agent: Agent,
        previewer: Previewer | None,
        oversubscribed: bool,
        on_step: Callable[[Step], None],
        on_summary: Callable[[Summary], None],
    ):
        world = computation.world
        self._layout, self._meter, self._agent, self._previewer = layout, meter, agent, previewer
        self._on_step, self._on_summary = on_step, on_summary
        self.idle_times = IdleTimes(world)
        self.summaries = StepSummaries(layout, world, oversubscribed)
        self._records = StepRecords(layout, world, computation.layers, computation.has_head)
        # Only one rank of each pipeline stage sends timelines, because the others run the same actions.
        self._sends_timeline = not any(world.coords[axis] for axis in ("dp", "cp", "tp"))
        self._loads_sent_s = 0.0

    def step(self, measured: Measured, conditions: StepConditions, clock: ScheduleClock) -> None:
        """Send this rank's record of a step. If samples are due for this step (`Agent.wants`), also send the
        timeline and the all-to-all bytes by destination rank."""
        readings, number = self._meter.readings, conditions.step
        record = self._records.step(readings, measured, conditions)
        self._agent.send(record)
        self._on_step(record)
        if readings.a2a_to and self._agent.wants("peers", number):
            self._agent.send(self._records.peers(readings, number))
        if self._sends_timeline and self._agent.wants("timeline", number):
            self._agent.send(self._records.timeline(readings, number))
        if self._previewer:
            busy_s = readings.busy() if readings.spans else None
            self._previewer.note_rank(record.memory_bytes, clock, self.idle_times.durations, busy_s)

    def start_summary(self, measured: Measured, conditions: StepConditions) -> None:
        """Start reducing the ranks' measurements to the step's summary on rank 0. The summary is completed by
        `publish`, which is called after the next step."""
        self.summaries.gather(self._meter.readings, measured, conditions)

    def publish(self) -> Summary | None:
        """Complete the summary that `start_summary` began, send it, and return it on rank 0. Returns None on other
        ranks, or if no summary was started."""
        collected = self.summaries.collect()
        if collected is None:
            return None
        summary = collected.summary
        if self._previewer:
            self._previewer.note(summary, collected.load.tolist())
            for event in self._previewer.take_events():
                self._agent.send(event)
        self._on_summary(summary)
        self._agent.send(summary)
        if self._agent.attached and self._layout.model.moe:
            if time.monotonic() - self._loads_sent_s >= LOADS_EVERY_S:
                self._loads_sent_s = time.monotonic()
                self._agent.send(collected.loads())
            if self._agent.wants("experts", summary.step):
                self._agent.send(collected.experts())
        return summary
