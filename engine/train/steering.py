"""Live control of a run, on one rank: knob board, vote on changes, pause and stop, profiling, previews."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from agents.protocol import Ack, Event
from agents.rank.agent import Agent
from agents.rank.provenance import provenance
from engine.checkpoint.manifest import Manifest
from engine.checkpoint.resume_point import start_value
from engine.config.layout import Layout
from engine.config.relayout import KNOB
from engine.control.actions import RunActions
from engine.control.knobs import make_board
from engine.control.preview.previewer import Previewer
from engine.control.profiler import Profiler
from engine.control.relayout import Relayout
from engine.control.vote import LEADER, KnobVote
from engine.device import device_name
from engine.planner.what_if import machine_of_run
from engine.rendezvous import usable_cores
from engine.telemetry.hello import hello, knob_board
from engine.train.computation import Computation
from engine.train.saving import KnobState, Saving

PAUSED_VOTE_S = 0.25  # time between two votes while the run is paused
POLL_S = 0.02


class Steering:
    """Applies operators' commands to a `Computation`, on all ranks at the same step boundary.

    `traces` is the folder for profiles; if it is None, the knob board has no profile action. `oversubscribed`: whether
    the ranks on this machine share cores. `began_s` is the start time of this rank in seconds since the epoch.
    `restarts`: how often the launcher has restarted the ranks of this run; None: the launcher cannot restart them, so
    the knob board has no knob `layout`. `earlier_s`: seconds from the first start of the ranks to `began_s`.
    """

    def __init__(
        self,
        layout: Layout,
        computation: Computation,
        agent: Agent,
        saving: Saving,
        traces: Path | None,
        oversubscribed: bool,
        began_s: float,
        restarts: int | None = None,
        earlier_s: float = 0.0,
    ):
        self._restarts, self._earlier_s = restarts or 0, earlier_s
        self._layout, self._agent, self._saving = layout, agent, saving
        self._computation = computation
        self._world = world = computation.world
        self._oversubscribed, self._began_s = oversubscribed, began_s
        self._started = provenance(traces.parent if traces else None, saving.checkpoints_dir, sys.argv)
        self.run_actions = RunActions()
        self.profiler = Profiler(traces, world.rank, world.grid, world.device) if traces else None
        self.relayout: Relayout | None = None
        if restarts is not None and saving.action:
            self.relayout = Relayout(layout, world.device, saving.action, lambda: self.run_actions.paused)
        actions = [*self.run_actions.knobs(), *(self.profiler.knobs() if self.profiler else ())]
        actions += [self.relayout.knob()] if self.relayout else []
        self.board = make_board(
            layout,
            computation.pipeline,
            computation.shards,
            computation.knob_values,
            computation.expert_placement,
            saving.action,
            actions,
        )
        self.vote = KnobVote(world.control, self.board, lambda: agent.pending, self._settle)
        self.previewer: Previewer | None = None
        if world.rank == LEADER:
            on_cpu = world.device.type == "cpu"
            hardware = machine_of_run(layout, device_name(world.device), usable_cores())
            self.previewer = Previewer(layout, self.board, oversubscribed, hardware, resident=on_cpu)
            agent.preview(self.previewer)

    @property
    def knob_state(self) -> KnobState:
        # A checkpoint contains its layout, and a run in any layout may resume from it.
        values = {name: value for name, value in self.board.values.items() if name != KNOB}
        return KnobState(values, self.board.revision, list(self.vote.history))

    def continue_from(self, manifest: Manifest) -> None:
        """Take over the revision and the history of changes from a restored checkpoint. The layout already has the
        checkpoint's knob values."""
        self.board.revision = manifest.revision
        self.vote.history += manifest.history

    def introduce(self, step: int) -> None:
        """Send the hub this rank's `Hello` message and, on the leader, the values and legal values of all knobs."""
        board = knob_board(self.board) if self._world.rank == LEADER else None
        rank = hello(
            self._layout,
            self._world,
            self.board,
            self._oversubscribed,
            step,
            self._began_s,
            self._started,
            self._computation.placement,
            self._restarts,
            self._earlier_s,
        )
        self._agent.introduce(rank, board)

    def leaves(self, step: int) -> bool:
        """Whether the ranks exit after `step` because the run continues in another layout. Returns True only if the
        checkpoint from which the run continues has been saved; if the save failed, the run keeps its layout. The result
        is the same on every rank."""
        relayout, checkpoints = self.relayout, self._saving.checkpoints
        if relayout is None or relayout.requested is None or checkpoints is None:
            return False
        checkpoints.wait()
        saved = checkpoints.result_of(step + 1)
        relayout.leaving = bool(saved and not saved.why)
        if not relayout.leaving:
            relayout.requested = None
            self.board.take_back({KNOB: start_value(self._layout, KNOB)})
            self.introduce(step + 1)
        self._saving.report()
        return relayout.leaving

    def wait_paused(self, stop_requested: Callable[[], bool]) -> None:
        """While the run is paused, wait until a command is pending, a stop is requested or the next vote is due. Only
        the leader waits."""
        if self._world.rank != LEADER:
            return
        deadline = time.monotonic() + PAUSED_VOTE_S
        while time.monotonic() < deadline and not self._agent.pending and not stop_requested():
            time.sleep(POLL_S)

    def report_traces(self) -> None:
        """Send an event for each trace that this rank has finished."""
        for trace in self.profiler.take_finished() if self.profiler else ():
            level: Literal["info", "error"] = "error" if trace.why else "info"
            self._agent.send(Event(time.time(), level, "engine", str(trace)))

    def end_traces(self) -> None:
        """End the running trace, if any, and wait until it is written."""
        if self.profiler:
            self.profiler.end()
            self.profiler.wait()

    def _settle(self, ack: Ack) -> None:
        if ack.state == "applied":
            # The board is sent before the ack, so that viewers see the new board first.
            self.introduce(ack.step)
            if self._saving.hold_ack(ack, self.vote.history[-1].changes):
                return
        self._agent.settle(ack)
