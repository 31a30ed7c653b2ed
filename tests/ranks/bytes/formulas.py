"""The bytes that a rank sends in one step, computed with the formulas of docs/evidence/bytes.md and with the
planner."""

from typing import Any

from engine.config.layout import Layout
from engine.config.schedule_traits import stages_of_rank
from engine.config.sections.model import Moe
from engine.model.interface import Block
from engine.model.moe.moe_layer import MoeLayer, Routing
from engine.parallel.expert_all_to_all import Hop
from engine.parallel.local_shards import local_shard
from engine.planner.workload.communication.traffic import traffic
from engine.planner.workload.job import Job
from engine.sharding.expert_rows import moe_layers
from engine.sharding.fsdp import EMBEDDING, named_parameters, replicated_over_tp
from engine.train.trainer import Trainer
from tests.ranks.bytes.fsdp_units import WIDTH, unit_bytes, units


def expected(
    layout: Layout, trainer: Trainer, routings: list[Routing], before: dict[int, list[int]]
) -> dict[str, Any]:
    """Bytes that this rank sends in one step, by axis, computed with the formulas of docs/evidence/bytes.md. `before`:
    each layer's expert placement before the step, if the placement changes in this step."""
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
    # The head and the loss run once more for each layer of multi-token prediction, after the embedding of a further
    # token.
    further = last * model.mtp_layers
    tp += m * ((first + further) * 2 * X + (last + further) * (2 * X + (t - 1) * 3 * b * S * 4))
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

    dp = sum(unit_bytes(layout, trainer, unit) for unit in units(layout, trainer))

    if model.moe and "bias" in model.moe.balances:
        n, f, r = moe * E * 8, grid.fsdp, grid.dp_replicate
        tp += 2 * (t - 1) * n // t
        dp += 2 * (f - 1) * n // f + 2 * (r - 1) * n // r

    to = _rows_to(world.rank, e, layout.ep_inner, [hop for r in routings for hop in r.dispatch.hops])
    passes = 3 if recompute == "full" else 2
    a2a = {str(peer): passes * rows * D * w for peer, rows in to.items() if rows}
    hops = [e] if layout.ep_inner is None else [layout.ep_inner, e // layout.ep_inner]
    ep = sum(a2a.values()) + m * moe * sum((n - 1) * E * 8 // n for n in hops)

    control = 2 * (W - 1) * 4 // W + (24 if world.rank == 0 else 0) if W > 1 else 0
    # Number of actions of the rank with the most actions: F and B of each stage and micro-batch, and a second part of B
    # if the schedule splits it.
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
    """The planner's bytes for each axis except `control`, given the number of rows that this rank sent to experts on
    other ranks. `control` is left out, because the planner's bytes for it include statistics that are sent in training
    but not in this test."""
    rank, grid = trainer.world.rank, layout.ranks
    to = _rows_to(rank, grid.ep, layout.ep_inner, [hop for r in routings for hop in r.dispatch.hops])
    counted = traffic(Job.of(layout), rank, sum(rows for peer, rows in to.items() if peer != rank))
    return {axis: counted[axis] for axis in counted if axis != "control"}


def _router_bytes_per_slice(layout: Layout, moe: Moe) -> int:
    """Bytes that a layer's router sends to each rank that holds another slice of the same sequence."""
    cp, tp = layout.grid.cp, layout.grid.tp
    counts = moe.experts * 4 * (2 if cp > 1 else 1)
    scores = layout.model.seq_len // (cp * tp) * moe.experts * 2
    limited = layout.knobs.capacity_factor is not None
    would = counts if moe.balances == ["aux", "bias"] else 0  # the loss needs separate counts
    if moe.router == "expert_choice" or (limited and moe.drop == "probability"):
        return scores + would
    return would + (counts if limited or moe.balances == ["aux"] else 0)


def _rows_to(me: int, ranks: int, inner: int | None, hops: list[Hop]) -> dict[int, int]:
    """The number of rows that rank `me` sends to each global rank, summed over both directions of the all-to-all. The
    ranks of an ep group have consecutive global ranks."""
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


def _moved_to(layout: Layout, trainer: Trainer, before: dict[int, list[int]]) -> dict[str, int]:
    """The bytes that this rank sends to each global rank when experts move: their weights and AdamW's two moments. The
    experts of an ep rank are stacked in one tensor, which is sharded over efsdp."""
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
