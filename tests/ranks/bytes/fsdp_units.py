"""The FSDP units of a rank, and the bytes and collectives that FSDP needs for each unit in a step."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from engine.config.checks.legal_values import shards_by_block
from engine.config.layout import Layout
from engine.config.schedule_traits import stages_of_rank
from engine.metering.meter import Meter
from engine.model.moe.moe_layer import Experts
from engine.model.stage import Stage
from engine.parallel.parameters import ParameterFactory
from engine.planner.timing.on_cores import unit_exchanges
from engine.planner.workload.job import Job
from engine.sharding.fsdp import is_expert
from engine.sharding.fsdp_hooks import param_groups
from engine.train.trainer import Trainer

WIDTH = {"fp32": 4, "bf16": 2}  # bytes per element of activations and gathered weights


@dataclass(frozen=True)
class Unit:
    """An FSDP unit. `numbers`: its number of parameters, with padding. `ranks`: number of ranks over which the unit is
    sharded."""

    numbers: int
    shards: tuple[tuple[int, ...], ...]  # padded shapes of the parameters' shards on one rank
    ranks: int
    stage: int
    root: bool


def units(layout: Layout, trainer: Trainer) -> list[Unit]:
    grid = layout.ranks
    mine = stages_of_rank(layout.schedule.name, trainer.world.coords["pp"], grid.pp, layout.virtual_stages)
    experts = is_expert(trainer.stages)
    shards: dict[tuple[int, str, int], list[tuple[int, ...]]] = defaultdict(list)
    for number, stage in zip(mine, whole_stages(layout, trainer), strict=True):
        for name, parameter in stage.named_parameters():
            # in a whole stage, the copy of the embedding's weight has another name
            expert = experts.get(name, False)
            ranks = grid.efsdp if expert else grid.fsdp
            shard = (-(-parameter.shape[0] // ranks), *parameter.shape[1:])
            unit = (
                ".".join(name.split(".")[:2]) if name.startswith(("layers.", "mtp.")) else name.split(".")[0]
            )
            # The root has everything outside blocks and head, such as the norms of multi-token prediction. A head that
            # is tied to an embedding of its stage belongs to the root, too.
            inside = unit.startswith("layers.") or ".block." in name or unit == "head"
            unit = unit if inside else "root"
            if not shards_by_block(layout):  # a stage is one unit, and its experts are another
                unit = "root"
            shards[number, "experts of " + unit if expert else unit, ranks].append(shard)
    return [
        Unit(sum(map(prod, of)) * ranks, tuple(of), ranks, number, name == "root")
        for (number, name, ranks), of in shards.items()
    ]


def unit_bytes(layout: Layout, trainer: Trainer, unit: Unit) -> int:
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
    """Bytes that a rank sends to sum the gradient of an FSDP unit over R replicas, from the table of
    docs/evidence/bytes.md."""
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


Exchanges = dict[str, list[list[int]]]
"""Gathers and reductions of each FSDP unit in a step: "dense" or "experts" -> [gathers, reductions] of each unit."""


def fsdp_exchanges(trainer: Trainer) -> Exchanges:
    """Start counting the all-gathers and reduce-scatters of FSDP: for each parameter group, a list of the two counts,
    which increase with each collective."""
    world, found = trainer.world, dict[str, list[list[int]]]()
    for unit in trainer.computation.shards._units:
        for group in param_groups(unit.module):
            kind = "experts" if any(isinstance(module, Experts) for module in group.modules) else "dense"
            if (world.edp if kind == "experts" else world.dp).size > 1:
                counts = [0, 0]
                found.setdefault(kind, []).append(counts)
                for n, name in enumerate(("_all_gather_comm", "_reduce_scatter_comm")):
                    setattr(group, name, _Counted(getattr(group, name), counts, n))
    return found


class _Counted:
    """Wraps a collective of FSDP2, and counts its calls in `counts[n]`."""

    def __init__(self, collective: Any, counts: list[int], n: int):
        self._collective, self._counts, self._n = collective, counts, n

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collective, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self._counts[self._n] += 1
        return self._collective(*args, **named)


def planned_exchanges(layout: Layout, trainer: Trainer) -> Exchanges:
    """How often the planner expects each FSDP unit to be gathered and reduced in a step."""
    grid, found = layout.ranks, dict[str, list[list[int]]]()
    gathers, reductions = unit_exchanges(Job.of(layout), trainer.world.coords["pp"])
    for kind, ranks in (("dense", grid.fsdp), ("experts", grid.efsdp)):
        if ranks > 1 and gathers[kind]:
            found[kind] = [[times, reductions] for times in gathers[kind]]
    return found


def whole_stages(layout: Layout, trainer: Trainer) -> list[nn.Module]:
    """Build this rank's stages without FSDP; they contain the rank's tp shards and experts."""
    weights = ParameterFactory(0, trainer.world.tp, trainer.world.ep)
    layers = [[int(n) for n in stage.layers] for stage in trainer.stages]
    meter = Meter(layout.model.layers, 8)
    return [
        Stage(weights, layout.model, range(ns[0], ns[-1] + 1), trainer.knob_values, meter) for ns in layers
    ]
