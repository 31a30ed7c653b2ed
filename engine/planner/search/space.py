"""The layouts that the search tries: every legal grid of the ranks, with a choice of schedule, micro-batch size,
recompute mode and ZeRO stage.

The search leaves out layouts that are unlikely to be the fastest. GPipe is not tried, because 1F1B takes the same time
and keeps fewer activations. A tp group never spans more ranks than the hardware's innermost links (such as NVLink)
connect, because otherwise every matmul would wait for the network. The search also leaves out context parallelism with
fewer than 2,048 tokens per rank, and pipelines of more than 64 ranks (32 with a split backward pass).
"""

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

import msgspec

from engine.config.grid import ORDER, divisors
from engine.config.layout import Layout
from engine.config.schedule_traits import (
    SCHEDULES,
    accepts_micro_batches,
    compatible_zero_stages,
    legal_recompute,
)

MICRO_BATCHES = (1, 2, 4, 8)  # sequences
LEAST_TOKENS = 2048  # minimum length of a rank's part of a sequence under context parallelism
MOST_STAGES = 64  # maximum number of pipeline ranks
MOST_SPLIT = 32  # maximum number of pipeline ranks with a split backward pass; simulating it is slow
MOST_VIRTUAL = 12


class Choice(NamedTuple):
    """The settings of a layout that the search varies. `micro_batch` is the micro-batch size in sequences."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    schedule: str
    virtual_stages: int
    micro_batch: int
    recompute: str
    zero: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes of all axes except data parallelism. A search result lists each shape once, with its fastest
        choice."""
        return self.pp, self.cp, self.tp, self.ep

    def of(self, layout: Layout) -> Layout:
        """`layout` with its settings replaced by those of this choice. The caller must check that the returned layout
        is legal."""
        replace = msgspec.structs.replace
        sizes = {axis: getattr(self, axis) for axis in (*ORDER, "ep")}
        one = SCHEDULES[self.schedule].virtual_stages
        micro_batches = layout.train.global_batch // (self.dp_replicate * self.dp_shard) // self.micro_batch
        own = Choice.in_layout(layout)
        same_stages = (self.pp, self.schedule, self.virtual_stages) == (
            own.pp,
            own.schedule,
            own.virtual_stages,
        )
        plan = replace(
            layout.plan,
            recomputed=layout.plan.recomputed if self.recompute == "none" else None,
            split=layout.plan.split if same_stages else None,
        )
        return replace(
            layout,
            grid=replace(layout.grid, **sizes),
            schedule=replace(
                layout.schedule, name=self.schedule, virtual_stages=None if one else self.virtual_stages
            ),
            train=replace(layout.train, zero=self.zero),
            knobs=replace(layout.knobs, micro_batches=micro_batches, recompute=self.recompute),
            plan=plan,
        )

    @classmethod
    def in_layout(cls, layout: Layout) -> "Choice":
        """The current settings of `layout` as a `Choice`."""
        grid = layout.ranks
        return cls(
            grid.pp,
            grid.dp_replicate,
            grid.dp_shard,
            grid.cp,
            grid.tp,
            grid.ep,
            layout.schedule.name,
            layout.virtual_stages,
            max(1, layout.local_batch // layout.knobs.micro_batches),
            layout.knobs.recompute,
            layout.train.zero,
        )

    def overrides(self, layout: Layout) -> list[str]:
        """The choice as `section.key=value` arguments."""
        changed = self.of(layout)
        found = [f"grid.{axis}={getattr(self, axis)}" for axis in (*ORDER, "ep")]
        found.append(f"schedule.name={self.schedule}")
        found.append(f"schedule.virtual_stages={changed.schedule.virtual_stages or 'none'}")
        found.append(f"train.zero={self.zero}")
        found.append(f"knobs.micro_batches={changed.knobs.micro_batches}")
        found.append(f"knobs.recompute={self.recompute}")
        keys = ("recomputed", "split")
        gone = [key for key in keys if getattr(layout.plan, key) and not getattr(changed.plan, key)]
        return found + [f"plan.{key}=none" for key in gone]

    def changes(self, layout: Layout) -> list[str]:
        """The arguments returned by `overrides` that differ from the layout's own settings."""
        own = Choice.in_layout(layout).overrides(layout)
        return [override for override in self.overrides(layout) if override not in own]


def choices(layout: Layout, ranks: int, domain: int | None) -> Iterator[Choice]:
    """Every choice for `ranks` ranks on hardware whose innermost links connect `domain` ranks. The choices are checked
    only for divisibility and for the rules of the schedules."""
    recompute = recompute_modes(layout)
    for pp, replicate, shard, cp, tp in _grids(layout, ranks, domain):
        local = layout.train.global_batch // (replicate * shard)
        schedules = list(_schedules(layout, pp))
        zeros = (0,) if shard * cp == 1 and replicate > 1 else (layout.train.zero or 2, 3)
        for micro_batch in MICRO_BATCHES:
            if local % micro_batch:
                continue
            m = local // micro_batch
            for name, virtual in schedules:
                if not accepts_micro_batches(name, pp, virtual, m):
                    continue
                for mode in recompute:
                    if mode not in legal_recompute(name):
                        continue
                    for zero in sorted({*zeros} & {*compatible_zero_stages(name)}):
                        for ep in _expert_sizes(layout, shard * cp * tp):
                            yield Choice(
                                pp, replicate, shard, cp, tp, ep, name, virtual, micro_batch, mode, zero
                            )


def _grids(layout: Layout, ranks: int, domain: int | None) -> Iterator[tuple[int, int, int, int, int]]:
    model, batch = layout.model, layout.train.global_batch
    dense = any(not model.has_experts(layer) for layer in range(model.layers))
    split = gcd(model.heads, model.kv, model.vocab, model.seq_len, model.ff if dense else 0)
    for pp in divisors(ranks):
        if pp > min(model.layers, MOST_STAGES):
            break
        for tp in divisors(ranks // pp):
            if split % tp or tp > (domain or ranks):
                continue
            for cp in divisors(ranks // pp // tp):
                if cp > 1 and (model.seq_len % (2 * cp * tp) or model.seq_len < cp * LEAST_TOKENS):
                    continue
                dp = ranks // pp // tp // cp
                if batch % dp == 0:
                    for shard in _shards(dp, cp * tp, domain):
                        yield pp, dp // shard, shard, cp, tp


def _shards(dp: int, inner: int, domain: int | None) -> list[int]:
    """Sizes of dp_shard: all data-parallel ranks, only those that the innermost links connect (HSDP), or 1 (replicas
    only)."""
    within = max(1, (domain or 1) // inner)
    return sorted({size for size in (dp, within, 1) if dp % size == 0})


def _expert_sizes(layout: Layout, stage: int) -> list[int]:
    moe = layout.model.moe
    return divisors(gcd(moe.experts, stage)) if moe else [1]


def _schedules(layout: Layout, pp: int) -> Iterator[tuple[str, int]]:
    layers = layout.model.layers
    if pp == 1:
        yield "1f1b", 1
        return
    for name, traits in SCHEDULES.items():
        if name == "gpipe" or (traits.split_backward and pp > MOST_SPLIT):
            continue
        if traits.virtual_stages:
            if pp * traits.virtual_stages <= layers:
                yield name, traits.virtual_stages
        else:
            even = [v for v in range(2, MOST_VIRTUAL + 1) if layers % (pp * v) == 0]
            fitting = [v for v in (2, 4, 8) if pp * v <= layers]
            for virtual in sorted({*even[-2:], *fitting}):
                yield name, virtual


def recompute_modes(layout: Layout) -> list[str]:
    """The recompute modes that have different effects in this layout. Megatron-LM's selective recompute drops only
    attention scores, which fused attention does not keep."""
    keeps_scores = layout.plan.framework == "engine" or not layout.plan.fused_attention
    return [mode for mode in ("none", "selective", "full") if mode != "selective" or keeps_scores]
