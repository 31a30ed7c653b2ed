"""The main function of each rank of `engine run`: it joins the process group, trains, and shuts down cleanly."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from agents.protocol import Ack, Event, Step, Summary, clip
from agents.rank.agent import Agent
from agents.rank.sensors.vitals import Sensors
from engine.checkpoint.save import Saved
from engine.config.layout import Layout
from engine.config.refusal import RefusedError
from engine.control.vote import LEADER
from engine.data.mixture import Text
from engine.device import BACKENDS, choose_device, device_uuid, set_device
from engine.launch.host_memory import give_back_freed_memory
from engine.launch.restarts.restart import Restart, Restarted
from engine.launch.torch_settings import (
    record_flight,
    set_timeouts,
    time_out_after,
    use_deterministic_algorithms,
)
from engine.metering.meter import Meter
from engine.rendezvous import RankContext
from engine.telemetry.flight_recorder import newest_collectives
from engine.train.text_samples import TextSample
from engine.train.trainer import Trainer

LAYOUT_KEY = "engine/layout"  # in the store: the digest of rank 0's layout
DEVICE_KEY = "engine/device"  # in the store: the type of the device that rank 0 computes on
START_KEY = "engine/start"  # in the store: rank 0's layout, checkpoints folder and checkpoint to resume from
TRACES = "profile"  # folder of traces, in the run's folder
STOP_KEY = "engine/stop"  # in the store: set by a rank other than rank 0 that has received a stop request


@dataclass(frozen=True)
class Finished:
    """How training ended. `leaving`: if an operator has changed the layout, the text of the new layout, in which the
    run continues; else None. `unsaved`: whether the last checkpoint could not be saved."""

    leaving: str | None
    unsaved: bool


def train(
    context: RankContext,
    layout: Layout,
    corpus: Text,
    validation_corpus: Text | None,
    on_step: Callable[[Step], None],
    on_summary: Callable[[Summary], None],
    on_checkpoint: Callable[[Saved], None],
    on_sample: Callable[[TextSample], None],
    checkpoints_dir: Path,
    resume: Path | None,
    given: Layout,
    device: str = "auto",
    restart: Restart | None = None,
    on_restarted: Callable[[Restarted], None] = lambda _: None,
    lost_output: Callable[[], str | None] = lambda: None,
) -> Finished:
    """Run the training that `layout` describes until its last step, or until it is stopped earlier, on the rank that
    `context` describes. If `resume` is given, start from that checkpoint.

    `restart`: information about earlier starts of the ranks; None if the launcher cannot start the ranks again.
    `on_restarted` is called on rank 0 after the first step that follows a restart. `lost_output`: called after each
    step; the sentence that it returns becomes a warning in the run's log.

    `given` is the layout as the user wrote it; `layout` is the same layout with the knob values of the checkpoint.
    Checkpoints are saved in `checkpoints_dir`. All ranks use the folders and knob values of rank 0. `device` is "cpu",
    "cuda" or "auto"; "auto" uses GPUs if this machine has one for each of its ranks. Raises RefusedError if the layout
    or the device type differs from that of rank 0, because the ranks would hang in their first collective.
    """
    store = context.store()
    check_same_layout(given, context, store)
    layout, checkpoints_dir, resume, folder = leader_settings(layout, checkpoints_dir, resume, context, store)
    if layout.model.implementation != given.model.implementation:
        raise RefusedError(
            "rank 0 names another model.implementation than this rank; legal: the same on all ranks"
        )
    if layout.train.deterministic:
        use_deterministic_algorithms()
    mine = join_process_group(context, store, device, layout.run.timeout_s, folder)
    if mine.type == "cpu":
        give_back_freed_memory()
    moe = layout.model.moe
    meter = Meter(layout.model.prediction_layers.stop, moe.experts if moe else 0, context.set_operation, mine)
    sensors = Sensors(device_uuid(mine), host=context.local_rank == 0)
    agent = Agent(context.hub, lambda: meter.operation, sensors, context.key, context.fallback)
    agent.collectives(newest_collectives)
    trainer = Trainer(
        layout,
        meter,
        agent,
        StopRequested(context, store),
        on_step=AfterStep(context, restart, agent, on_step, on_restarted, lost_output),
        on_summary=on_summary,
        local_world=context.local_world,
        corpus=corpus,
        validation_corpus=validation_corpus,
        on_checkpoint=on_checkpoint,
        on_sample=on_sample,
        checkpoints_dir=checkpoints_dir,
        resume=resume,
        given=given,
        traces=folder / TRACES,
        restarts=restart.number if restart else None,
        earlier_s=restart.begin(context.rank == LEADER) if restart else 0.0,
        save_requested=context.save.take,
    )
    set_timeouts(trainer.world.groups, layout.run.timeout_s)
    trainer.run()
    relayout = trainer.steering.relayout
    leaving = relayout.requested if relayout and relayout.leaving else None
    if agent.pending and not leaving:
        command, board = agent.pending, trainer.board
        agent.settle(
            Ack(context.rank, command.revision, "expired", meter.step, board.digest(), "the run has ended")
        )
    agent.close(restarting=leaving is not None)
    # gloo aborts at exit if the process group still exists.
    dist.destroy_process_group()
    return Finished(leaving, trainer.saving.unsaved(meter.step + 1))


class AfterStep:
    """Calls `on_step` after each step, and reports lost output. On rank 0, this object also records when each step
    ends, so that the time from the last step before a restart to the first step after it is known. After the first step
    that follows a restart, it reports this time in the run's log and calls `on_restarted`."""

    def __init__(
        self,
        context: RankContext,
        restart: Restart | None,
        agent: Agent,
        on_step: Callable[[Step], None],
        on_restarted: Callable[[Restarted], None],
        lost_output: Callable[[], str | None],
    ):
        self._lost_output = lost_output
        self._restart = restart if context.rank == LEADER else None
        self._world, self._agent = context.world, agent
        self._on_step, self._on_restarted = on_step, on_restarted
        self._said = restart is None or restart.number == 0

    def __call__(self, step: Step) -> None:
        self._on_step(step)
        if lost := self._lost_output():
            self._agent.send(Event(time.time(), "warning", "engine", clip(lost)))
        if self._restart is None:
            return
        now = time.monotonic()
        if not self._said:
            self._said = True
            restarted = self._restart.at_first_step(step, self._world, now - step.step_ms / 1e3)
            self._agent.send(Event(time.time(), "info", "engine", str(restarted), restarted.facts))
            self._on_restarted(restarted)
        self._restart.handover.step_done(now)


def join_process_group(
    context: RankContext, store: Store, device: str, timeout_s: int | None = None, run_dir: Path | None = None
) -> torch.device:
    """Choose this rank's device and join the default process group. `timeout_s`: the time-out of collectives in
    seconds; None: torch's default. On GPUs, torch's flight recorder writes to `run_dir`, if it is given. Raises
    RefusedError if the device type differs from that of rank 0."""
    mine = choose_device(context.local_rank, context.local_world, device)
    check_same_device(mine, context, store)
    set_device(mine)
    if mine.type == "cuda" and run_dir is not None:
        record_flight(os.environ, run_dir)
    dist.init_process_group(
        BACKENDS[mine.type],
        store=PrefixStore("engine/group", store),
        rank=context.rank,
        world_size=context.world,
        device_id=mine if mine.type == "cuda" else None,
        timeout=time_out_after(timeout_s),
    )
    return mine


def check_same_layout(layout: Layout, context: RankContext, store: Store) -> None:
    """Raise RefusedError on any rank whose layout differs from that of rank 0."""
    mine = layout.whole_digest()
    if context.rank == LEADER:
        store.set(LAYOUT_KEY, mine)
    elif (theirs := store.get(LAYOUT_KEY).decode()) != mine:
        raise RefusedError(
            f"rank {context.rank} has a different layout than rank 0 (digest {mine}, not {theirs}); "
            "legal: the same layout on all ranks"
        )


def check_same_device(mine: torch.device, context: RankContext, store: Store) -> None:
    """Raise RefusedError on any rank whose device type differs from that of rank 0."""
    if context.rank == LEADER:
        store.set(DEVICE_KEY, mine.type)
    elif (theirs := store.get(DEVICE_KEY).decode()) != mine.type:
        raise RefusedError(
            f"rank {context.rank} computes on {mine.type}, but rank 0 computes on {theirs}; legal: a "
            f"visible GPU for each rank "
            "on every machine, or --device cpu"
        )


def leader_settings(
    layout: Layout, checkpoints_dir: Path, resume: Path | None, context: RankContext, store: Store
) -> tuple[Layout, Path, Path | None, Path]:
    """Rank 0's layout, checkpoints folder, checkpoint to resume from, and run folder. All ranks use rank 0's values,
    because the values that each rank determines by itself might differ. For example, a rank that starts a second later
    would choose another name for the run's folder, and another rank may not see the newest checkpoint or may not know
    that it is damaged.
    """
    if context.rank == LEADER:
        found = layout, checkpoints_dir, resume, context.run_dir
        paths = [str(path.resolve()) if path else None for path in found[1:]]
        store.set(START_KEY, msgspec.json.encode((layout, *paths)).decode())
        return found
    layout, *paths = msgspec.json.decode(store.get(START_KEY), type=tuple[Layout, str, str | None, str])
    checkpoints, checkpoint, folder = paths
    return layout, Path(str(checkpoints)), Path(checkpoint) if checkpoint else None, Path(str(folder))


class StopRequested:
    """Whether the run must stop. SIGTERM may arrive at any rank; a rank other than rank 0 informs rank 0 through a key
    in the store.
    """

    def __init__(self, context: RankContext, store: Store):
        self._context, self._store = context, store
        self._sent = False

    def __call__(self) -> bool:
        requested = self._context.stop_requested()
        if self._context.rank == LEADER:
            return requested or self._store.check([STOP_KEY])
        if requested and not self._sent:
            self._store.set(STOP_KEY, "1")
            self._sent = True
        return requested
