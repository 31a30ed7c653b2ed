"""Parity cases with several parallel axes at once, for the parts of the engine that few other cases cover
(`tests/ranks/parity/parts.py`)."""

from tests.ranks.cases.case import (
    ADAMW,
    BF16,
    DROPS,
    EXPERT_CHOICE,
    FP16,
    FULL,
    INTERLEAVED_ZB,
    SELECTIVE,
    SGD,
    SURE,
    TWO_HOPS,
    ULYSSES,
    Case,
    alone,
)
from tests.ranks.cases.over_collectives import MEASURED
from tests.ranks.cases.over_compiled import ON
from tests.ranks.cases.over_models import MLA, MTP, QWEN2, WINDOW
from tests.ranks.cases.over_own_models import gpt
from tests.ranks.token_shards import SHARDS

BIASES = ["model.bias=true"]
# The schedule ends with the last step, so that its rate changes in every step.
COSINE, LINEAR, WSD = (
    ["train.steps=20", f"train.lr_schedule={name}"] for name in ("cosine", "linear", "wsd")
)
DATA = [*SHARDS, "train.ema=0.8"]  # two weighted sources, averaged weights
PARTS = [*BIASES, *WINDOW, *DATA]

MIXES: dict[str, Case] = {
    "biases tp fp64": Case([*alone("grid.tp=2"), *BIASES, *SGD], fp64=True),
    "window tp fp64": Case([*alone("grid.tp=2"), *WINDOW, *SGD], fp64=True),
    "wsd averaged sources dp fp64": Case([*alone("grid.dp_shard=2"), *DATA, *ADAMW, *WSD], fp64=True),
    "parts pp dp zero 3 expert choice fp64": Case(
        [
            *alone("grid.pp=2", "grid.dp_shard=2", "train.zero=3"),
            *[*PARTS, *WSD, *EXPERT_CHOICE, *SGD, *FULL],
        ],
        fp64=True,
    ),
    "parts measured replicas tp expert choice fp64": Case(
        [*alone(MEASURED, "grid.dp_replicate=2", "grid.tp=2"), *PARTS, *LINEAR, *EXPERT_CHOICE, *SGD],
        fp64=True,
    ),
    "parts interleaved zb tp fp64": Case(
        [*alone("grid.tp=2"), *INTERLEAVED_ZB, *PARTS, *COSINE, *ADAMW], fp64=True
    ),
    "parts dp cp ulysses two hops drops fp64": Case(
        [
            *alone("grid.dp_shard=2", "grid.cp=2", "grid.ep=4", *ULYSSES, *TWO_HOPS),
            *[*PARTS, *COSINE, *SGD, *DROPS],
        ],
        fp64=True,
    ),
    "parts measured pp replicas mtp fp64": Case(
        [*alone(MEASURED, "grid.pp=2", "grid.dp_replicate=2", "train.zero=0"), *PARTS, *MTP, *WSD, *SGD],
        fp64=True,
    ),
    "parts measured hsdp tp expert choice fp64": Case(
        [
            *alone(MEASURED, "grid.dp_replicate=2", "grid.dp_shard=2", "grid.tp=2", "grid.ep=2"),
            *[*PARTS, *LINEAR, *EXPERT_CHOICE, *ADAMW, *SELECTIVE],
        ],
        fp64=True,
    ),
    "parts measured interleaved zb cp ulysses replicas fp64": Case(
        [
            *alone(MEASURED, "grid.cp=2", "grid.dp_replicate=2", *ULYSSES),
            *[*INTERLEAVED_ZB, *QWEN2, *WINDOW, *DATA, *LINEAR, *SGD],
        ],
        fp64=True,
    ),
    "mtp dp tp surest drops fp64": Case(
        [*alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=2"), *MTP, *SURE, *SGD], fp64=True
    ),
    "gpt interleaved zb replicas fp64": Case(
        gpt("grid.dp_replicate=2", "train.zero=0", *INTERLEAVED_ZB), fp64=True
    ),
    "gpt pp hsdp zero 3 fp64": Case(
        gpt("grid.pp=2", "grid.dp_replicate=2", "grid.dp_shard=2", "train.zero=3"), fp64=True
    ),
    "bf16 pp replicas biases window": Case(
        [*alone("grid.pp=2", "grid.dp_replicate=2", *BF16), *BIASES, *WINDOW, *SGD]
    ),
    "fp16 pp tp ep": Case([*alone("grid.pp=2", "grid.tp=2", "grid.ep=2", *FP16), *SGD]),
    "fp16 dp cp ring": Case([*alone("grid.dp_shard=2", "grid.cp=2", *FP16), *SGD, *SELECTIVE]),
    "fp16 hsdp zero 3": Case(
        [*alone("grid.dp_replicate=2", "grid.dp_shard=2", "train.zero=3", *FP16), *SGD, *FULL]
    ),
    "fp16 tp cp ulysses biases": Case([*alone("grid.tp=2", "grid.cp=2", *ULYSSES, *FP16), *BIASES, *SGD]),
    "fp16 pp replicas mla": Case([*alone("grid.pp=2", "grid.dp_replicate=2", *FP16), *MLA, *SGD]),
    "compiled pp tp fp64": Case([*alone(ON, "grid.pp=2", "grid.tp=2"), *SGD], fp64=True),
    "compiled dp tp ep drops fp64": Case(
        [*alone(ON, "grid.dp_shard=2", "grid.tp=2", "grid.ep=4"), *SGD, *DROPS], fp64=True
    ),
    "compiled hsdp mla fp64": Case(
        [*alone(ON, "grid.dp_replicate=2", "grid.dp_shard=2"), *MLA, *SGD], fp64=True
    ),
    "compiled pp dp zero 3 full fp64": Case(
        [*alone(ON, "grid.pp=2", "grid.dp_shard=2", "train.zero=3"), *SGD, *FULL], fp64=True
    ),
    "compiled pp cp ring fp64": Case([*alone(ON, "grid.pp=2", "grid.cp=2"), *SGD], fp64=True),
}
