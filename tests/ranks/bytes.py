"""Computes the bytes of a step with the formulas of docs/bytes.md, and compares them with the meter of each rank.

python -m tests.ranks.bytes FOLDER NAME ...
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from agents.rank.agent import Agent
from engine.config.checks.legal_values import shards_by_block
from engine.config.layout import Layout, Moe
from engine.config.schedule_traits import stages_of_rank
from engine.config.toml import load
from engine.launch.processes.local_ranks import launch
from engine.metering.meter import Meter
from engine.model.moe import MoeLayer, Routing
from engine.model.transformer import Block, Stage
from engine.parallel.expert_all_to_all import Hop
from engine.parallel.local_shards import local_shard
from engine.parallel.parameters import ParameterFactory
from engine.planner.workload.job import Job
from engine.planner.workload.traffic import traffic
from engine.rendezvous import RankContext
from engine.sharding.expert_rows import moe_layers
from engine.sharding.fsdp import EMBEDDING, is_expert, named_parameters, replicated_over_tp
from engine.train.trainer import Trainer
from tests.ranks.case import (
    BF16,
    DEEPSEEK,
    DROPS,
    EXPERT_CHOICE,
    FULL,
    INTERLEAVED,
    LAYOUT,
    SELECTIVE,
    SMALL,
    SURE,
    TIED,
    TWO_HOPS,
    ULYSSES,
    V3,
    ZBV,
)
from tests.ranks.over_models import MLA, QWEN3

WIDTH = {"fp32": 4, "bf16": 2}  # bytes per element of activations and gathered weights


def packed(method: str) -> list[str]:
    """Overrides that compress all gradients except the smallest ones."""
    return [
        f"compression.method={method}",
        "compression.ratio=0.03",
        "compression.rank=3",
        "compression.min_elements=300",
    ]


CASES = {
    "demo": ["train.steps=1"],
    "demo drops full": [*DROPS, *FULL],
    "demo selective gpipe": [*SELECTIVE, "schedule.name=gpipe", "knobs.micro_batches=8"],
    "tp dense full": [*SMALL, "grid.tp=2", "model.moe=none", *FULL],
    "tp mixed": [*SMALL, "grid.tp=2", "grid.ep=2", "model.moe.every=2", *SELECTIVE],
    "dp ep": [*SMALL, "grid.dp_shard=4", "grid.ep=2", "knobs.micro_batches=1"],
    "hsdp": [*SMALL, "grid.dp_replicate=2", "grid.dp_shard=2", "grid.ep=2"],
    "hsdp top_k": [*SMALL, "grid.dp_replicate=2", "grid.dp_shard=2", "grid.ep=2", *packed("top_k")],
    "replicas int8 pp": [*SMALL, "grid.dp_replicate=2", "grid.pp=2", *packed("int8"), "model.vocab=257"],
    "replicas power tp": [*SMALL, "grid.dp_replicate=2", "grid.tp=2", *packed("power_sgd")],
    "replicas 4 bf16": [*SMALL, "grid.dp_replicate=4", *packed("bf16"), "knobs.micro_batches=1", *TIED],
    "replicas 4 random": [*SMALL, "grid.dp_replicate=4", *packed("random_k"), "knobs.micro_batches=1"],
    "replicas tp": [*SMALL, "grid.dp_replicate=2", "grid.tp=2", "train.zero=0"],
    "two hops": [
        *SMALL,
        "grid.dp_shard=2",
        "grid.tp=2",
        "grid.ep=4",
        *TWO_HOPS,
        *FULL,
    ],
    "placed": [*SMALL, "grid.dp_shard=4", "grid.ep=2"],
    "bf16": [*BF16, *SELECTIVE],
    "bf16 hsdp cp": [*SMALL, *BF16, "grid.dp_replicate=2", "grid.dp_shard=2", "grid.cp=2", "train.zero=3"],
    "compiled": [*SMALL, "grid.dp_shard=2", "grid.tp=2", "grid.ep=2", "train.compile=true", *DROPS, *FULL],
    "tied": [*SMALL, "grid.dp_shard=2", "grid.tp=2", *TIED],
    "tied pp zero 3": [
        *SMALL,
        "grid.pp=3",
        "grid.dp_shard=2",
        "model.layers=3",
        "model.vocab=257",  # an odd number, so two data-parallel ranks have shards of different sizes
        "train.zero=3",
        "knobs.micro_batches=4",
        *TIED,
    ],
    "tied zbv": [*SMALL, *ZBV, *TIED],
    "zero 1": [*SMALL, "grid.dp_shard=2", "train.zero=1", "knobs.micro_batches=4"],
    "zero 3 full": [*SMALL, "grid.dp_shard=2", "grid.ep=2", "train.zero=3", *FULL],
    "pp zero 3": [
        *SMALL,
        "grid.pp=2",
        "grid.dp_shard=2",
        "model.layers=3",
        "train.zero=3",
        "knobs.micro_batches=4",
    ],
    "pp": [*SMALL, "grid.pp=2", "model.layers=3"],
    "pp cp tp ring": [*SMALL, "grid.pp=2", "grid.cp=2", "grid.tp=2", "grid.ep=4", *SELECTIVE],
    "qwen3 biases": [*SMALL, "grid.dp_shard=2", "grid.tp=2", "grid.ep=2", *QWEN3, "model.bias=true", *FULL],
    "mla tp ring": [*SMALL, "grid.cp=2", "grid.tp=2", "grid.ep=2", *MLA, *SELECTIVE],
    "mla ulysses": [
        *SMALL,
        "grid.cp=2",
        "grid.tp=2",
        "model.moe=none",
        *MLA,
        "model.q_rank=none",
        *ULYSSES,
        *FULL,
    ],
    "cp ulysses": [*SMALL, "grid.cp=4", "grid.ep=2", *ULYSSES, *FULL],
    "dp cp ring": [*SMALL, "grid.dp_shard=2", "grid.cp=2", "grid.ep=4"],
    "pp tp ep zbv": [*SMALL, *ZBV, "grid.tp=2", "grid.ep=2", "model.layers=5"],
    "pp dp interleaved": [*SMALL, *INTERLEAVED, "grid.dp_shard=2", "grid.ep=2", "model.layers=5"],
    "deepseek": [*SMALL, "grid.dp_shard=2", "grid.tp=2", "grid.ep=2", *DEEPSEEK, *FULL],
    "v3": [*SMALL, "model.layers=3", "grid.cp=2", "grid.tp=2", "grid.ep=2", *V3, *DROPS],
    "deepseek surest": [*SMALL, "grid.dp_replicate=2", "grid.tp=2", *DEEPSEEK, *SURE],
    "expert choice cp": [*SMALL, "grid.cp=2", "grid.tp=2", "grid.ep=2", *EXPERT_CHOICE, *SELECTIVE],
}


def expected(
    layout: Layout, trainer: Trainer, routings: list[Routing], before: dict[int, list[int]]
) -> dict[str, Any]:
    """Bytes that this rank sends in one step, by axis, from the formulas of docs/bytes.md. `before` is the expert
    placement before the step, if experts move in it."""
    model, grid, world = layout.model, layout.ranks, trainer.world
    m = trainer.computation.pipeline.plan.micro_batches
    t, c, e, W = grid.tp, grid.cp, grid.ep, grid.world
    b, S, D = layout.local_batch // m, model.seq_len // c, model.d_model
    mine = stages_of_rank(layout.schedule.name, world.coords["pp"], grid.pp, layout.virtual_stages)
    first, last = 0 in mine, layout.stages - 1 in mine
    recompute = trainer.knob_values.recompute
    blocks = [module for stage in trainer.stages for module in stage.modules() if isinstance(module, Block)]
    moe = sum(isinstance(block.mlp, MoeLayer) for block in blocks)
    E = model.moe.experts if model.moe else 0

    w = WIDTH[layout.train.precision]
    X = (t - 1) * b * (S // t) * D * w
    gathers, scatters = {"none": (2, 2), "selective": (3, 2), "full": (3, 3)}[recompute]
    q_rank, kv_rank, nope, rope, v = model.latent
    latent = model.attention == "mla"
    input_width = (q_rank or D) + kv_rank + rope if latent else D
    attention = gathers * X * input_width // D + scatters * X
    dense = {"none": 4, "selective": 4, "full": 5}[recompute]
    tp = m * (len(blocks) * attention + (len(blocks) - moe) * dense * X)
    router = m * moe * b * _router_bytes_per_slice(layout, model.moe) if model.moe else 0
    tp += router * (t - 1) if c == 1 else 0
    tp += m * (first * 2 * X + last * (2 * X + (t - 1) * 3 * b * S * 4))
    if t > 1:
        r = sum(local_shard(p).numel() for p in replicated_over_tp(trainer.stages))
        tp += 2 * (t - 1) * r * 4 // t

    again = recompute != "none"
    H, G, both = model.heads // t, model.kv // t, nope + rope + v if latent else 2 * model.head_width
    if layout.grid.cp_method == "ulysses":
        attended = (2 + again) * (c - 1) * b * (H // c + max(G // c, 1)) * S * both * w
    else:
        attended = ((2 + again) * w + 4) * (c - 1) * b * G * S * both
    cp = m * len(blocks) * attended + (router * (c * t - 1) if c > 1 else 0)

    forth = sum(stage + 1 < layout.stages and stage + 1 not in mine for stage in mine)
    back = sum(stage > 0 and stage - 1 not in mine for stage in mine)
    pp = m * (forth + back) * b * (S // t) * D * w

    if layout.tied_apart:
        pp += sum(
            local_shard(p).numel() * 4 for name, p in named_parameters(trainer.stages) if name == EMBEDDING
        )

    dp = sum(_unit_bytes(layout, trainer, unit) for unit in _units(layout, trainer))

    if model.moe and "bias" in model.moe.balances:
        n, f, r = moe * E * 8, grid.fsdp, grid.dp_replicate
        tp += 2 * (t - 1) * n // t
        dp += 2 * (f - 1) * n // f + 2 * (r - 1) * n // r

    to = _rows_to(world.rank, e, layout.ep_inner, [hop for r in routings for hop in r.dispatch.hops])
    passes = 3 if recompute == "full" else 2
    a2a = {str(peer): passes * rows * D * w for peer, rows in to.items() if rows}
    hops = [e] if layout.ep_inner is None else [layout.ep_inner, e // layout.ep_inner]
    ep = sum(a2a.values()) + m * moe * sum((n - 1) * E * 8 // n for n in hops)

    control = (W - 1) * 4 + (24 if world.rank == 0 else 0) if W > 1 else 0
    # Number of actions of the rank that has the largest number: F and B of each stage and micro-batch, and a second
    # part of B if the schedule splits it.
    split = sum(act.kind == "I" for act in max(trainer.computation.pipeline.plan.clock.acts, key=len))
    control += (grid.pp - 1) * 8 * (1 + 2 * m * len(mine) + split)
    if before:
        assert before != maps(trainer), "no expert has moved"
        moved = _moved_to(layout, trainer, before)
        a2a = {peer: a2a.get(peer, 0) + moved.get(peer, 0) for peer in a2a | moved}
        ep += sum(moved.values())
        control += 2 * (W - 1) * e * model.layers * E * 8 // W + (W - 1) * (512 + 64)
    return {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp, "control": control, "a2a": a2a}


def planned(layout: Layout, trainer: Trainer, routings: list[Routing]) -> dict[str, float]:
    """The planner's count, given the rows that the routers chose; control traffic without the statistics, which this
    driver does not send."""
    rank, grid = trainer.world.rank, layout.ranks
    to = _rows_to(rank, grid.ep, layout.ep_inner, [hop for r in routings for hop in r.dispatch.hops])
    counted = traffic(Job.of(layout), rank, sum(rows for peer, rows in to.items() if peer != rank))
    return {axis: counted[axis] for axis in counted if axis != "control"}


def _router_bytes_per_slice(layout: Layout, moe: Moe) -> int:
    """Bytes that a layer's router tells each other slice of one sequence."""
    cp, tp = layout.grid.cp, layout.grid.tp
    counts = moe.experts * 4 * (2 if cp > 1 else 1)
    scores = layout.model.seq_len // (cp * tp) * moe.experts * 2
    limited = layout.knobs.capacity_factor is not None
    would = counts if moe.balances == ["aux", "bias"] else 0  # the loss needs separate counts
    if moe.router == "expert_choice" or (limited and moe.drop == "probability"):
        return scores + would
    return would + (counts if limited or moe.balances == ["aux"] else 0)


def _rows_to(me: int, ranks: int, inner: int | None, hops: list[Hop]) -> dict[int, int]:
    """The number of rows that rank `me` sends to each global rank, in both directions of the all-to-all (ep is the
    fastest axis of the expert view)."""
    position = me % ranks
    group = list(range(me - position, me - position + ranks))
    inner = inner or ranks
    within = group[position // inner * inner :][:inner]
    turns = [within] if inner == ranks else [within, group[position % inner :: inner]]
    rows: dict[int, int] = {}
    for n, hop in enumerate(hops):
        for peer, out, back in zip(turns[n % len(turns)], hop.send, hop.receive, strict=True):
            if peer != me:
                rows[peer] = rows.get(peer, 0) + out + back
    return rows


@dataclass(frozen=True)
class Unit:
    """An FSDP unit: its padded number of parameters, and the number of ranks that shard it."""

    numbers: int
    shards: tuple[tuple[int, ...], ...]  # padded shapes of the parameters' shards on one rank
    ranks: int
    stage: int
    root: bool


def _units(layout: Layout, trainer: Trainer) -> list[Unit]:
    grid = layout.ranks
    mine = stages_of_rank(layout.schedule.name, trainer.world.coords["pp"], grid.pp, layout.virtual_stages)
    experts = is_expert(trainer.stages)
    shards: dict[tuple[int, str, int], list[tuple[int, ...]]] = defaultdict(list)
    for number, stage in zip(mine, whole_stages(layout, trainer), strict=True):
        for name, parameter in stage.named_parameters():
            expert = experts.get(
                name, False
            )  # in a whole stage, the copy of the embedding's weight has another name
            ranks = grid.efsdp if expert else grid.fsdp
            shard = (-(-parameter.shape[0] // ranks), *parameter.shape[1:])
            unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]
            unit = {"embedding": "root", "norm": "root"}.get(unit, unit)
            if not shards_by_block(layout):  # a stage is one unit, and its experts are another
                unit = "root"
            shards[number, "experts of " + unit if expert else unit, ranks].append(shard)
    return [
        Unit(sum(map(prod, of)) * ranks, tuple(of), ranks, number, name == "root")
        for (number, name, ranks), of in shards.items()
    ]


def _unit_bytes(layout: Layout, trainer: Trainer, unit: Unit) -> int:
    grid, zero, micro_batches = (
        layout.ranks,
        trainer.computation.shards.zero,
        trainer.computation.pipeline.plan.micro_batches,
    )
    once_a_micro_batch = micro_batches if grid.pp == 1 else 1
    gathers = 1
    if zero == 3 and unit.root:
        gathers = once_a_micro_batch
    elif zero == 3:
        order = [span.kind for span in trainer.meter.readings.spans if span.stage == unit.stage]
        kept = [before == "B" and grid.pp > 1 for before in ["", *order[:-1]]]
        gathers = kept.count(False)
    reductions = once_a_micro_batch if zero >= 2 else 1
    width = gathers * WIDTH[layout.train.precision] + reductions * 4
    within = width * (unit.ranks - 1) * unit.numbers // unit.ranks
    return within + _over_replicas(layout, unit.shards)


def _over_replicas(layout: Layout, shards: Sequence[tuple[int, ...]]) -> int:
    """Bytes to sum a unit's gradient over R replicas, from the table of docs/bytes.md."""
    R, settings = layout.grid.dp_replicate, layout.compression
    rank = settings.rank
    large = [shape for shape in shards if prod(shape) >= settings.min_elements]
    if settings.method == "none" or R == 1:
        large = []
    if settings.method == "power_sgd":
        large = [s for s in large if len(s) > 1 and min(rank, *s[-2:]) * (s[-2] + s[-1]) < s[-2] * s[-1]]
    n, exact = sum(map(prod, large)), sum(map(prod, shards)) - sum(map(prod, large))
    k = min(n, max(1, round(settings.ratio * n))) if n else 0
    total = 2 * (R - 1) * 4 * exact // R
    match settings.method if large else "none":
        case "bf16" | "fp16":
            total += 2 * (R - 1) * -(-n // R) * 2
        case "int8":
            blocks = -(-n // (256 * R))
            total += 2 * (R - 1) * blocks * (256 + 4)
        case "top_k":
            total += (R - 1) * k * 8
        case "random_k":
            total += 2 * (R - 1) * k * 4 // R
        case "power_sgd":
            for side in (-2, -1):
                numbers = sum(prod(s[:-2]) * s[side] * min(rank, *s[-2:]) for s in large)
                total += 2 * (R - 1) * numbers * 4 // R
    return total


def _moved_to(layout: Layout, trainer: Trainer, before: dict[int, list[int]]) -> dict[str, int]:
    """The bytes of moved experts that this rank sends to each global rank, with AdamW's two moments. The experts of an
    ep rank are a stack, which is sharded over efsdp."""
    model, grid, me = layout.model, layout.ranks, trainer.world.rank
    assert model.moe
    E, of_a_stage = model.moe.experts, grid.efsdp * grid.ep
    stack = E // grid.ep

    def holder(slot: int) -> int:
        return me // of_a_stage * of_a_stage + slot % stack * grid.efsdp // stack * grid.ep + slot // stack

    moved: dict[str, int] = {}
    for n, layer in moe_layers(trainer.stages).items():
        for slot, expert in enumerate(layer.placement.logical):
            source, target = holder(before[n].index(expert)), holder(slot)
            if source == me != target:
                moved[str(target)] = (
                    moved.get(str(target), 0) + 3 * 3 * model.d_model * model.moe.d_expert * 4
                )
    return moved


def maps(trainer: Trainer) -> dict[int, list[int]]:
    return {n: layer.placement.logical for n, layer in moe_layers(trainer.stages).items()}


def step(trainer: Trainer, number: int) -> None:
    trainer.meter.start_step(number)
    trainer.steering.vote.begin(number, stop=False)
    trainer.computation.forward_backward(number)
    trainer.reporting.idle_times.send(trainer.meter.readings, trainer.computation.pipeline.plan.clock)
    trainer.computation.update(number, trainer.computation.gradient_norm())
    trainer.steering.vote.end(number)
    trainer.reporting.idle_times.split()


def whole_stages(layout: Layout, trainer: Trainer) -> list[nn.Module]:
    """This rank's stages without FSDP, with its tensor shards and its experts."""
    weights = ParameterFactory(0, trainer.world.tp, trainer.world.ep)
    layers = [[int(n) for n in stage.layers] for stage in trainer.stages]
    meter = Meter(layout.model.layers, 8)
    return [
        Stage(weights, layout.model, range(ns[0], ns[-1] + 1), trainer.knob_values, meter) for ns in layers
    ]


def compare(context: RankContext, layout: Layout, out: Path, moving: bool) -> None:
    dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.world)
    meter = Meter(layout.model.layers, layout.model.moe.experts if layout.model.moe else 0)
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
    step(trainer, 1)
    metered: dict[str, Any] = {axis: lane.bytes for axis, lane in meter.readings.lanes.items()}
    metered["a2a"] = {str(peer): sent for peer, sent in meter.readings.a2a_to.items()}
    (out / f"{context.rank}.json").write_text(
        json.dumps([expected(layout, trainer, routings, before), metered, planned(layout, trainer, routings)])
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
