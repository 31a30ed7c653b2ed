"""Parity cases with torch.compile, compared with one process that runs without torch.compile."""

from tests.ranks.cases.case import BF16, DROPS, FULL, SELECTIVE, SGD, SWITCHED, Case, alone

ON = "train.compile=true"
SIGMOID = ["model.moe.score=sigmoid", "model.moe.balance=bias", "knobs.bias_rate=0.02"]

COMPILED: dict[str, Case] = {
    "compiled one layer ep fp64": Case(  # compiles the smallest number of functions
        [
            *alone(ON, "grid.dp_shard=2", "grid.ep=2", "model.layers=1", "model.moe.balance=none"),
            *SGD,
            *DROPS,
        ],
        fp64=True,
    ),
    "compiled tp fp64": Case([*alone(ON, "grid.tp=2"), *SGD], fp64=True),
    "compiled dp ep drops fp64": Case(
        [*alone(ON, "grid.dp_shard=2", "grid.ep=2"), *SGD, *DROPS, "knobs.z_loss_coef=0.1"], fp64=True
    ),
    "compiled dp zero 3 full fp64": Case(
        [*alone(ON, "grid.dp_shard=2", "grid.ep=2", "train.zero=3"), *SGD, *FULL], fp64=True
    ),
    "compiled pp mixed selective fp64": Case(
        [*alone(ON, "grid.pp=2", "model.moe.every=2"), *SGD, *SELECTIVE], fp64=True
    ),
    "compiled cp tp shared fp64": Case(
        [*alone(ON, "grid.cp=2", "grid.tp=2", "grid.ep=2"), *SGD, *SIGMOID, "model.moe.shared_experts=2"],
        fp64=True,
    ),
    "compiled zero 3 switched fp64": Case(
        [*alone(ON, "grid.dp_shard=2", "train.zero=3"), *SGD], fp64=True, script=SWITCHED
    ),
    "compiled bf16": Case([*alone(ON, *BF16, "grid.dp_shard=2", "model.moe=none"), *SGD]),
}
