"""Measures the memory of live tensor storages on each rank, and writes it to a file with the planner's prediction.

python -m tests.ranks.memory FOLDER NAME ...

Each rank writes `RANK.json`, with its peak memory during start-up, the bytes of its shards, and the measured and
predicted peak memory of a step. For small models without a pipeline, the file also contains the measured and predicted
bytes that the forward pass of a micro-batch keeps. For the prediction, the planner is given a measured ratio: the
number of token rows that the rank received, divided by the number that it sent. `start_resident` is the process's peak
resident memory during start-up, and `peak_resident` is its peak resident memory up to the end of the measured step.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median_low

import torch
import torch.distributed as dist

from engine.config.layout import Layout
from engine.config.toml import load
from engine.launch.host_memory import give_back_freed_memory
from engine.launch.processes.local_ranks import launch
from engine.model.moe import moe_layer
from engine.parallel.expert_all_to_all import Dispatch, plan_dispatch
from engine.parallel.local_shards import local_shard
from engine.planner.memory.peak import LayerBytes, saved_of_stage
from engine.planner.memory.plan import plan_memory
from engine.planner.workload.job import Job
from engine.rendezvous import RankContext
from engine.train.trainer import Trainer
from tests.ranks.cases.case import LAYOUT
from tests.ranks.memory.cases import CASES, LARGE
from tests.ranks.memory.live_storages import LiveStorages
from tests.ranks.memory.resident import Resident


class Received:
    """Counts the token rows (one for each token-expert pair) that this rank has sent, and those that its experts have
    received, since this object was created."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def plan(self, *args: object) -> Dispatch:
        dispatch = plan_dispatch(*args)  # type: ignore[arg-type]
        self.sent += len(dispatch.tokens_N)
        self.received += sum(dispatch.hops[-1].receive) if dispatch.hops else len(dispatch.tokens_N)
        return dispatch


def kept_by_forward(trainer: Trainer, live: LiveStorages) -> int:
    """Number of bytes that the forward pass of a micro-batch leaves allocated. The weights do not count, because they
    are gathered before the measurement."""
    computation, layout = trainer.computation, trainer.layout
    first = computation.world.coords["dp"] * layout.local_batch
    sequences = computation.samples.batch(0, first, layout.local_batch)
    part = sequences.chunk(layout.knobs.micro_batches)[0]
    tokens, targets, starts = (None if x is None else x.clone() for x in part)
    computation.shards.gather()

    def loss() -> torch.Tensor:
        stage = computation.stages[0]
        return computation._loss_of(stage(tokens, starts, targets if stage.mtp else None), targets)

    kept, losses = list[int](), [loss()]
    for _ in range(5):  # a thread of gloo may free a buffer late: before a measurement, or between two
        before = live.now()
        losses.append(loss())
        kept.append(live.now() - before)
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    computation.shards.complete()
    computation.optimizer.zero_grad()
    return median_low(kept)


def measure(place: RankContext, layout: Layout, out: Path, big: bool = False) -> None:
    dist.init_process_group("gloo", store=place.store(), rank=place.rank, world_size=place.world)
    rows = Received()
    moe_layer.plan_dispatch = rows.plan  # type: ignore[assignment]
    job = Job.of(layout)
    found: dict[str, float] = {}
    give_back_freed_memory()
    resident = Resident()
    with LiveStorages() as live:
        trainer = Trainer(layout)
        found["start"], found["start_resident"] = live.peak, resident.peak
        found["shards"] = sum(local_shard(p).nbytes for stage in trainer.stages for p in stage.parameters())
        at = trainer.world.coords
        if layout.grid.pp == 1 and not big:
            trainer.meter.start_step(0)
            found["kept"] = kept_by_forward(trainer, live)
            imbalance = rows.received / rows.sent if rows.sent else 1.0
            found["kept_plan"] = sum(
                saved_of_stage(LayerBytes(replace(job, imbalance=imbalance)), 0, masked=True).values()
            )
        trainer.train_step(0)
        live.peak = 0
        trainer.train_step(1)
        found["peak"], found["peak_resident"] = live.peak, resident.peak
    imbalance = rows.received / rows.sent if rows.sent else 1.0
    plan = plan_memory(replace(job, imbalance=imbalance), gloo=True).ranks[at["pp"]]
    found["start_plan"], found["peak_plan"] = plan.parameters, plan.total
    (out / f"{place.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        layout, out = load(LAYOUT, (CASES | LARGE)[name]), folder / name
        out.mkdir(parents=True)

        def work(place: RankContext, layout: Layout = layout, out: Path = out) -> None:
            measure(place, layout, out, out.name in LARGE)

        name_of_rank = layout.ranks.name
        if launch(layout.ranks.world, work, name_of_rank=name_of_rank, hub="none", run="memory", run_dir=out):
            raise SystemExit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
