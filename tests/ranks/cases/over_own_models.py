"""Parity cases in fp64 with a user's own model (tests/ranks/models/gpt.py) instead of the built-in model."""

from tests.ranks.cases.case import FULL, SGD, ZEROED, Case, alone

GPT = ["model.implementation=tests.ranks.models.gpt:Gpt", "model.moe=none", "model.kv_heads=none"]


def gpt(*overrides: str) -> list[str]:
    return [*alone(), *GPT, *SGD, *overrides]


OWN_MODELS: dict[str, Case] = {
    "gpt dp zero 3 full fp64": Case(gpt("grid.dp_shard=2", "train.zero=3", *FULL), fp64=True),
    "gpt replicas zero 0 fp64": Case(gpt("grid.dp_replicate=2", "train.zero=0"), fp64=True),
    "gpt dp zero 1 fp64": Case(gpt("grid.dp_shard=2", "train.zero=1"), fp64=True),
    "gpt dp zero switched fp64": Case(
        gpt("grid.dp_shard=2", "grid.dp_replicate=2", "train.global_batch=16"), fp64=True, script=ZEROED
    ),
    "gpt pp dp zero 3 full fp64": Case(gpt("grid.pp=2", "grid.dp_shard=2", "train.zero=3", *FULL), fp64=True),
    "gpt pp zbv fp64": Case(
        gpt("grid.pp=2", "model.layers=4", "schedule.name=zbv", "knobs.micro_batches=4"), fp64=True
    ),
    "gpt pp interleaved zb dp fp64": Case(
        gpt(
            *("grid.pp=2", "grid.dp_shard=2", "model.layers=4", "schedule.name=interleaved_zb"),
            *("train.zero=1", "knobs.micro_batches=4"),
        ),
        fp64=True,
    ),
    "gpt pp dp switched fp64": Case(
        gpt("grid.pp=2", "grid.dp_shard=2", "train.global_batch=32", "knobs.micro_batches=4"),
        fp64=True,
        script={
            4: {"micro_batches": 8},
            9: {"recompute": "full"},
            13: {"recompute": "none", "schedule": "gpipe"},
        },
    ),
}
