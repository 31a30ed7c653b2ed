"""Parity cases of model parts: heads of their own width, norms of heads, biases, latent attention."""

from tests.ranks.case import DROPS, FULL, SELECTIVE, SGD, Case, alone

QWEN3 = ["model.head_dim=16", "model.qk_norm=true"]  # the usual width of a head would be 8
QWEN2 = ["model.qkv_bias=true"]

MODELS: dict[str, Case] = {
    "qwen3 tp cp ring ep drops fp64": Case(
        [*alone("grid.tp=2", "grid.cp=2", "grid.ep=4"), *QWEN3, *SGD, *DROPS, *SELECTIVE], fp64=True
    ),
    "qwen3 tied pp dp zero 3 fp64": Case(
        [
            *alone("grid.pp=2", "grid.dp_shard=2", "grid.ep=2", "train.zero=3", "model.tie_embeddings=true"),
            *QWEN3,
            *SGD,
            *FULL,
        ],
        fp64=True,
    ),
    "qwen3 cp ulysses zbv fp64": Case(
        [
            *alone("grid.pp=2", "grid.cp=2", "grid.cp_method=ulysses", "model.layers=4"),
            *["schedule.name=zbv", "knobs.micro_batches=4"],
            *QWEN3,
            *SGD,
        ],
        fp64=True,
    ),
    "qwen2 biases tp dp fp64": Case(
        [*alone("grid.tp=2", "grid.dp_shard=2", "model.moe.dense_layers=1"), *QWEN2, *SGD], fp64=True
    ),
    "biases pp tp dense fp64": Case(
        [*alone("grid.pp=2", "grid.tp=2", "model.moe=none", "model.bias=true"), *SGD, *FULL], fp64=True
    ),
}
