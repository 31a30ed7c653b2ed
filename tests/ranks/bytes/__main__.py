"""Computes the bytes that each rank sends in a step with the formulas of docs/evidence/bytes.md, and compares them with
the bytes that the rank's meter counts.

python -m tests.ranks.bytes FOLDER NAME ...
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agents.rank.agent import Agent
from engine.config.layout import Layout
from engine.config.toml import load
from engine.launch.processes.local_ranks import launch
from engine.metering.meter import Meter
from engine.model.moe.moe_layer import MoeLayer, Routing
from engine.rendezvous import RankContext
from engine.train.trainer import Trainer
from tests.ranks.bytes.cases import CASES
from tests.ranks.bytes.formulas import expected, maps, planned
from tests.ranks.bytes.fsdp_units import fsdp_exchanges, planned_exchanges
from tests.ranks.cases.case import (
    LAYOUT,
)


def step(trainer: Trainer, number: int) -> None:
    trainer.meter.start_step(number)
    trainer.steering.vote.begin(number, stop=False)
    trainer.computation.forward_backward(number)
    trainer.reporting.idle_times.send(trainer.meter.readings, trainer.computation.pipeline.plan.clock)
    trainer.computation.update(number, trainer.computation.gradient_norm())
    trainer.steering.vote.end(number)
    trainer.reporting.idle_times.split()


def compare(context: RankContext, layout: Layout, out: Path, moving: bool) -> None:
    dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.world)
    meter = Meter(layout.model.prediction_layers.stop, layout.model.moe.experts if layout.model.moe else 0)
    trainer = Trainer(layout, meter, Agent(None, lambda: meter.operation))
    routings: list[Routing] = []
    for module in (module for stage in trainer.stages for module in stage.modules()):
        if isinstance(module, MoeLayer):
            route = module._route
            module._route = lambda scores, route=route: routings.append(route(scores)) or routings[-1]
    before: dict[int, list[int]] = {}
    if moving and trainer.computation.expert_placement:
        step(trainer, 0)
        routings.clear()
        before, trainer.computation.expert_placement.request = maps(trainer), "load"
    counted = fsdp_exchanges(trainer)
    step(trainer, 1)
    metered: dict[str, Any] = {axis: lane.bytes for axis, lane in meter.readings.lanes.items()}
    metered["a2a"] = {str(peer): sent for peer, sent in meter.readings.a2a_to.items()}
    (out / f"{context.rank}.json").write_text(
        json.dumps(
            [
                expected(layout, trainer, routings, before),
                metered,
                planned(layout, trainer, routings),
                counted,
                planned_exchanges(layout, trainer),
            ]
        )
    )
    dist.destroy_process_group()


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        layout, out = load(LAYOUT, CASES[name]), folder / name
        out.mkdir(parents=True)

        def work(
            context: RankContext, layout: Layout = layout, out: Path = out, moving: bool = name == "placed"
        ) -> None:
            compare(context, layout, out, moving)

        name_of_rank = layout.ranks.name
        if launch(layout.ranks.world, work, name_of_rank=name_of_rank, hub="none", run="bytes", run_dir=out):
            raise SystemExit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
