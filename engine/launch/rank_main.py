"""The work of each rank of `engine run`: join the process group, train, shut down in order."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from agents.protocol import Ack, Step, Summary
from agents.rank.agent import Agent
from agents.rank.vitals import Sensors
from engine.checkpoint.save import Saved
from engine.config.layout import Layout
from engine.config.refusal import RefusedError
from engine.control.vote import LEADER
from engine.device import BACKENDS, choose_device, device_uuid, set_device
from engine.metering.meter import Meter
from engine.rendezvous import RankContext
from engine.train.corpus import Corpus
from engine.train.trainer import Trainer

LAYOUT_KEY = "engine/layout"  # in the store: the digest of rank 0's layout
DEVICE_KEY = "engine/device"  # in the store: the type of the device that rank 0 computes on
START_KEY = (
    "engine/start"  # in the store: rank 0's layout, its checkpoints folder, the checkpoint to resume from
)
TRACES = "profile"  # folder of traces, in the run's folder
STOP_KEY = "engine/stop"  # in the store: some rank has received a stop request


def train(
    place: RankContext,
    layout: Layout,
    corpus: Corpus,
    on_step: Callable[[Step], None],
    on_summary: Callable[[Summary], None],
    on_checkpoint: Callable[[Saved], None],
    checkpoints_dir: Path,
    resume: Path | None,
    given: Layout,
    device: str = "auto",
) -> None:
    """Train `layout` to its end as the rank that `place` says, from the checkpoint `resume` if there is one.

    `layout` is the layout `given` with the knob values of the checkpoint. Checkpoints are saved in `checkpoints_dir`.
    All ranks use rank 0's folders and knob values. `device` is "cpu", "cuda", or "auto": a GPU if this machine has one
    for each of its ranks. Raises RefusedError if the layout or the device type of this rank differs from that of rank
    0, because the ranks would then wait for each other.
    """
    store = place.store()
    agree_on(given, place, store)
    layout, checkpoints_dir, resume, folder = told_by_leader(layout, checkpoints_dir, resume, place, store)
    mine = choose_device(place.local_rank, place.local_world, device)
    agree_on_device(mine, place, store)
    set_device(mine)
    dist.init_process_group(
        BACKENDS[mine.type],
        store=PrefixStore("engine/group", store),
        rank=place.rank,
        world_size=place.world,
        device_id=mine if mine.type == "cuda" else None,
    )
    moe = layout.model.moe
    meter = Meter(layout.model.layers, moe.experts if moe else 0, place.set_operation, mine)
    sensors = Sensors(device_uuid(mine), host=place.local_rank == 0)
    agent = Agent(place.hub, lambda: meter.doing, sensors, place.key)
    trainer = Trainer(
        layout,
        meter,
        agent,
        StopWord(place, store),
        on_step=on_step,
        on_summary=on_summary,
        local_world=place.local_world,
        corpus=corpus,
        on_checkpoint=on_checkpoint,
        checkpoints_dir=checkpoints_dir,
        resume=resume,
        given=given,
        traces=folder / TRACES,
    )
    trainer.run()
    if agent.pending:
        command, board = agent.pending, trainer.board
        agent.settle(
            Ack(place.rank, command.revision, "expired", meter.step, board.digest(), "the run has ended")
        )
    agent.close()
    # Without this, gloo aborts at exit.
    dist.destroy_process_group()


def agree_on(layout: Layout, place: RankContext, store: Store) -> None:
    """Raise RefusedError on any rank whose layout differs from that of rank 0."""
    mine = layout.whole_digest()
    if place.rank == LEADER:
        store.set(LAYOUT_KEY, mine)
    elif (theirs := store.get(LAYOUT_KEY).decode()) != mine:
        raise RefusedError(
            f"rank {place.rank} was started with another layout than rank 0 ({mine}, not {theirs})"
        )


def agree_on_device(mine: torch.device, place: RankContext, store: Store) -> None:
    """Raise RefusedError on any rank whose device type differs from that of rank 0."""
    if place.rank == LEADER:
        store.set(DEVICE_KEY, mine.type)
    elif (theirs := store.get(DEVICE_KEY).decode()) != mine.type:
        raise RefusedError(
            f"rank {place.rank} computes on {mine.type}, but rank 0 on {theirs}; legal: a GPU in sight of each "
            "rank, as many as a machine has ranks, or --device cpu"
        )


def told_by_leader(
    layout: Layout, checkpoints_dir: Path, resume: Path | None, place: RankContext, store: Store
) -> tuple[Layout, Path, Path | None, Path]:
    """The layout, folders and checkpoint of rank 0, which all ranks use.

    Another rank may have named the run's folder a second later, may not see the newest checkpoint yet, or may not know
    that it is damaged.
    """
    if place.rank == LEADER:
        found = layout, checkpoints_dir, resume, place.run_dir
        places = [str(path.resolve()) if path else None for path in found[1:]]
        store.set(START_KEY, msgspec.json.encode((layout, *places)).decode())
        return found
    layout, *told = msgspec.json.decode(store.get(START_KEY), type=tuple[Layout, str, str | None, str])
    kept, begun, folder = told
    return layout, Path(str(kept)), Path(begun) if begun else None, Path(str(folder))


class StopWord:
    """Whether the run must stop. SIGTERM may reach any single rank, which then sets a key in the store for rank 0."""

    def __init__(self, place: RankContext, store: Store):
        self._place, self._store = place, store
        self._told = False

    def __call__(self) -> bool:
        asked = self._place.stop_requested()
        if self._place.rank == LEADER:
            return asked or self._store.check([STOP_KEY])
        if asked and not self._told:
            self._store.set(STOP_KEY, "1")
            self._told = True
        return asked
