"""Parity cases of model parts: explicit head dimensions, QK norm, biases, latent attention."""

from tests.ranks.cases.case import (
    ADAMW,
    BF16,
    DROPS,
    FULL,
    INTERLEAVED,
    SELECTIVE,
    SGD,
    TIED,
    ULYSSES,
    V3,
    Case,
    alone,
)
from tests.ranks.token_shards import SHORT

QWEN3 = ["model.head_dim=16", "model.qk_norm=true"]  # without head_dim, the width of a head would be 8
# The widths of a query (16 + 8), of a value (12) and of the model over heads (8) differ.
MLA = [
    *["model.attention=mla", "model.kv_heads=none", "model.q_rank=24", "model.kv_rank=20"],
    *["model.nope_dim=16", "model.rope_dim=8", "model.v_dim=12"],
]
# queries are projected directly, as in DeepSeek-V2-Lite
WIDE_VALUES = [
    *MLA,
    "model.q_rank=none",
    "model.v_dim=28",
]
WINDOW = ["model.window=12"]  # the last of the three blocks of a sequence of 32 tokens is not full
MTP = ["model.mtp_layers=2"]
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
    "window tp dp drops fp64": Case(
        [*alone("grid.tp=2", "grid.dp_shard=2", "grid.ep=2"), *WINDOW, *SGD, *DROPS, *SELECTIVE], fp64=True
    ),
    "window pp cp ulysses qwen3 fp64": Case(
        [*alone("grid.pp=2", "grid.cp=2", *ULYSSES), *WINDOW, *QWEN3, *SGD, *FULL], fp64=True
    ),
    "mla tp fp64": Case([*alone("grid.tp=2"), *MLA, *SGD], fp64=True),
    "mla cp ring fp64": Case([*alone("grid.cp=2"), *MLA, *SGD, *SELECTIVE], fp64=True),
    "mla cp ulysses fp64": Case([*alone("grid.cp=2", *ULYSSES), *MLA, *SGD, *FULL], fp64=True),
    "mla wide values cp tp ring drops fp64": Case(
        [*alone("grid.cp=2", "grid.tp=2", "grid.ep=4"), *WIDE_VALUES, *SGD, *DROPS], fp64=True
    ),
    "mla v3 pp tp ep drops fp64": Case(
        [*alone("grid.pp=2", "grid.tp=2", "grid.ep=2", "model.layers=3"), *MLA, *V3, *SGD, *DROPS], fp64=True
    ),
    "mla v3 mix dp cp tp zero 3 fp64": Case(
        [
            *alone("grid.dp_shard=2", "grid.cp=2", "grid.tp=2", "grid.ep=4", "train.zero=3"),
            *MLA,
            *V3,
            *SGD,
            *FULL,
        ],
        fp64=True,
    ),
    "mla dualpipev tp ulysses fp64": Case(
        [
            *alone("grid.pp=2", "grid.cp=2", "grid.tp=2", "model.layers=4", *ULYSSES),
            *["schedule.name=dualpipev", "knobs.micro_batches=4"],
            *WIDE_VALUES,
            *SGD,
        ],
        fp64=True,
    ),
    "mla bf16 dp ep": Case([*alone("grid.dp_shard=2", "grid.ep=2"), *MLA, *BF16, *SGD]),
    "mtp fp64": Case([*alone(), *MTP, *SGD], fp64=True),
    "mtp dp zero 3 ep tied fp64": Case(
        [*alone("grid.dp_shard=2", "grid.ep=2", "train.zero=3", *TIED), *MTP, *SGD, *FULL], fp64=True
    ),
    "mtp tp cp ring drops fp64": Case(
        [*alone("grid.tp=2", "grid.cp=2", "grid.ep=4"), *MTP, *ADAMW, *DROPS, *SELECTIVE], fp64=True
    ),
    "mtp v3 mla dp cp tp ulysses fp64": Case(
        [
            *alone("grid.dp_shard=2", "grid.cp=2", "grid.tp=2", "grid.ep=4", *ULYSSES),
            *MLA,
            *V3,
            *MTP,
            *SGD,
        ],
        fp64=True,
    ),
    "mtp pp tp dp drops fp64": Case(
        [*alone("grid.pp=2", "grid.dp_shard=2", "grid.tp=2", "grid.ep=2"), *MTP, *ADAMW, *DROPS], fp64=True
    ),
    "mtp tied pp cp zero 3 fp64": Case(
        [*alone("grid.pp=2", "grid.cp=2", "train.zero=3", *TIED), *MTP, *SGD, *FULL], fp64=True
    ),
    "mtp interleaved documents fp64": Case(
        [*alone(*INTERLEAVED), *MTP, *SGD, *SHORT, "data.separate_documents=true"], fp64=True
    ),
    "mtp bf16 pp dense": Case([*alone("grid.pp=2", "model.moe=none"), *MTP, *BF16, *SGD]),
    "biases pp tp dense fp64": Case(
        [*alone("grid.pp=2", "grid.tp=2", "model.moe=none", "model.bias=true"), *SGD, *FULL], fp64=True
    ),
}

# The mini layouts, each in five grids. Micro-batches and sequences are small, so that a case takes seconds.
MINIS = ("llama-mini", "mixtral-mini", "qwen3-moe-mini", "deepseek-v3-mini")
GRIDS = {
    "as it is": "",
    "replicas zero 0": "grid.pp=1 grid.dp_shard=1 grid.tp=1 grid.dp_replicate=2 grid.ep=1 train.zero=0",
    "cp ring tp": "grid.pp=1 grid.dp_shard=1 grid.cp=2 grid.tp=2 grid.ep={ep}",
    "pp cp ulysses zero 3": (
        "grid.pp=2 grid.dp_shard=1 grid.tp=1 grid.cp=2 grid.cp_method=ulysses grid.ep={half} train.zero=3 "
        "knobs.recompute=full"
    ),
    "zbv dp": "grid.pp=2 grid.dp_shard=2 grid.tp=1 grid.ep={half} schedule.name=zbv train.zero=2",
}
OF_MINIS: dict[str, Case] = {
    f"{mini} {name} fp64": Case(
        [
            *["model.seq_len=32", "train.global_batch=8", "train.warmup=4", *SGD[:2]],
            *grid.format(ep=1 if mini == "llama-mini" else 4, half=1 if mini == "llama-mini" else 2).split(),
        ],
        fp64=True,
        of=mini,
    )
    for mini in MINIS
    for name, grid in GRIDS.items()
}
