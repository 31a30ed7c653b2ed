"""Parity cases of routers: token and expert choice, groups, load balancing, dropping."""

from tests.ranks.cases.case import (
    BALANCED,
    BIAS,
    BIASED,
    DEEPSEEK,
    DROPS,
    EXPERT_CHOICE,
    FULL,
    GROUPS,
    INTERLEAVED,
    SELECTIVE,
    SGD,
    SHARED,
    SMALL,
    SURE,
    V3,
    WEIGHED,
    Case,
    alone,
)

ROUTERS: dict[str, Case] = {
    "deepseek mix drops fp64": Case(
        [*SMALL, "grid.pp=2", "grid.tp=2", "grid.ep=2", *SGD, *DEEPSEEK, *SURE, *FULL], fp64=True
    ),
    "deepseek dp tp fp64": Case(
        [*SMALL, "grid.dp_shard=2", "grid.tp=2", "grid.ep=4", *SGD, *DEEPSEEK], fp64=True, script=BIASED
    ),
    "v3 mix drops fp64": Case(
        [*SMALL, "model.layers=3", "grid.pp=2", "grid.tp=2", "grid.ep=2", *SGD, *V3, *DROPS, *FULL],
        fp64=True,
        script=WEIGHED,
    ),
    "v3 dense stage dp ep placed fp64": Case(  # the first stage has no experts
        [*SMALL, "grid.pp=2", "grid.dp_shard=2", "grid.ep=2", *SGD, *V3],
        fp64=True,
        script={4: {"expert_placement": "load"}, 10: {"expert_placement": "logical"}},
    ),
    "v3 cp tp surest drops fp64": Case(
        [*alone("grid.cp=2", "grid.tp=2"), "grid.ep=4", "model.layers=3", *SGD, *V3, *SURE, *SELECTIVE],
        fp64=True,
    ),
    "expert choice mix fp64": Case(
        [*SMALL, "grid.pp=2", "grid.tp=2", "grid.ep=2", *SGD, *EXPERT_CHOICE, *FULL],
        fp64=True,
        script={6: {"capacity_factor": 1.7}, 13: {"capacity_factor": 0.4}},
    ),
    "losses turned fp64": Case(
        [*alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=2"), *SGD, *SURE], fp64=True, script=BALANCED
    ),
    "replicas bias fp64": Case([*alone("grid.dp_replicate=2", "grid.dp_shard=2"), *SGD, *BIAS], fp64=True),
    "tp groups fp64": Case([*alone("grid.tp=2"), *SGD, *GROUPS], fp64=True),
    "tp sigmoid fp64": Case(
        [*alone("grid.tp=2"), *SGD, "model.moe.score=sigmoid", "knobs.aux_loss_coef=0.5"],
        fp64=True,
    ),
    "tp bias fp64": Case([*alone("grid.tp=2"), *SGD, *BIAS, *FULL], fp64=True),
    "tp z-loss fp64": Case([*alone("grid.tp=2"), *SGD, "knobs.z_loss_coef=0.5"], fp64=True),
    "cp surest bias drops fp64": Case([*alone("grid.cp=2", "grid.tp=2"), *SGD, *BIAS, *SURE], fp64=True),
    "cp expert choice fp64": Case([*alone("grid.cp=2", "grid.dp_shard=2"), *SGD, *EXPERT_CHOICE], fp64=True),
    "deepseek interleaved fp64": Case(
        [*alone(*INTERLEAVED), "grid.tp=2", "grid.ep=2", *SGD, *DEEPSEEK], fp64=True
    ),
    "tp shared fp64": Case([*alone("grid.tp=2"), *SGD, *SHARED, *SELECTIVE], fp64=True),
    "tp expert choice fp64": Case([*alone("grid.tp=2"), *SGD, *EXPERT_CHOICE], fp64=True),
    "tp surest drops fp64": Case([*alone("grid.tp=2"), *SGD, *SURE], fp64=True),
    "dp ep surest drops fp64": Case(
        [*alone("grid.dp_shard=2", "grid.ep=2"), *SGD, *SURE, "train.zero=3"], fp64=True
    ),
}
