"""Parity cases for the expert all-to-all: direct, hierarchical, and after a change of expert placement."""

from tests.ranks.cases.case import (
    ADAMW,
    DEEPSEEK,
    DROPS,
    EXPERT_CHOICE,
    FULL,
    INTERLEAVED,
    PLACED,
    SGD,
    SURE,
    TWO_HOPS,
    Case,
    alone,
)

EXPERTS: dict[str, Case] = {
    "deepseek placed drops fp64": Case(
        [*alone("grid.dp_shard=2", "grid.ep=2"), *SGD, *DEEPSEEK, *SURE],
        fp64=True,
        script=PLACED,
    ),
    "ep two hops drops fp64": Case(
        [*alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=4"), *TWO_HOPS, *SGD, *DROPS], fp64=True
    ),
    "ep 8 two hops drops fp64": Case(
        [*alone("grid.dp_shard=8", "grid.ep=8"), *TWO_HOPS, "knobs.micro_batches=1", *SGD, *DROPS, *FULL],
        fp64=True,
    ),
    "pp ep two hops fp64": Case(
        [*alone("grid.pp=2", "grid.dp_shard=4", "grid.ep=4", "grid.ep_inner=2"), *TWO_HOPS, *SGD],
        fp64=True,
    ),
    "mix cp tp placed drops fp64": Case(
        [*alone("grid.cp=2", "grid.tp=2", "grid.ep=4"), *SGD, *DROPS],
        fp64=True,
        script=PLACED,
    ),
    "ep placed fp64": Case([*alone("grid.dp_shard=2", "grid.ep=2"), *ADAMW], fp64=True, script=PLACED),
    "pp ep placed drops fp64": Case(
        [*alone("grid.pp=2", "grid.dp_shard=4", "grid.ep=2"), *ADAMW, *DROPS, *FULL],
        fp64=True,
        script=PLACED,
    ),
    "ep 4 placed fp64": Case(
        [*alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=4"), *SGD, *TWO_HOPS],
        fp64=True,
        script=PLACED,
    ),
    "ep part placed fp64": Case(
        [*alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=2", "train.zero=3"), *SGD],
        fp64=True,
        script=PLACED,
    ),
    "ep uneven shards placed fp64": Case(
        [*alone("grid.dp_shard=8", "grid.ep=2", "model.moe.experts=6", "knobs.micro_batches=1"), *ADAMW],
        fp64=True,
        script=PLACED,
    ),
    "interleaved placed fp64": Case(
        [*alone(*INTERLEAVED, "grid.dp_shard=2", "grid.ep=2"), *ADAMW],
        fp64=True,
        script=PLACED,
    ),
    "deepseek two hops placed drops fp64": Case(
        [*alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=4"), *TWO_HOPS, *SGD, *DEEPSEEK, *DROPS],
        fp64=True,
        script=PLACED,
    ),
    "expert choice two hops fp64": Case(
        [*alone("grid.dp_shard=4", "grid.ep=4"), *TWO_HOPS, *SGD, *EXPERT_CHOICE], fp64=True
    ),
    "pp placed zero switched fp64": Case(
        [*alone("grid.pp=2", "grid.dp_shard=4", "grid.ep=2", "train.zero=3"), *ADAMW],
        fp64=True,
        script={**PLACED, 8: {"zero": 1}, 11: {"zero": 3}},
    ),
    "replicas placed fp64": Case(
        [*alone("grid.dp_replicate=2", "grid.dp_shard=2", "grid.ep=2"), *ADAMW],
        fp64=True,
        script=PLACED,
    ),
}
