"""Parity cases with one rank, to run on a GPU: each kind of layer, router, precision and knob that one rank can have.

Attention within documents or a window uses flex attention on a GPU, which supports neither fp64 nor heads narrower than
16, so these cases are in fp32 and bf16 with wider heads.
"""

from tests.ranks.cases.case import (
    ADAMW,
    BF16,
    CLIPPED,
    DROPS,
    EXPERT_CHOICE,
    FP16,
    FULL,
    SELECTIVE,
    SGD,
    SMALL,
    SURE,
    SWITCHED,
    TIED,
    TURNED,
    V3,
    WEIGHED,
    ZEROED,
    Case,
)
from tests.ranks.cases.over_compiled import ON
from tests.ranks.cases.over_documents import APART, RESET
from tests.ranks.cases.over_models import MLA, MTP, QWEN2, QWEN3, WINDOW

DENSE = ["model.moe=none"]
ZERO_3 = ["train.zero=3"]
WIDE = ["model.head_dim=16"]
GPT = [*DENSE, "model.norm=layernorm", "model.activation=gelu", "model.positions=learned", "model.bias=true"]

_FP64 = {
    "dense": [*DENSE, *SGD],
    "dense adamw zero 3": [*DENSE, *ZERO_3, *ADAMW, *FULL],
    "gpt tied": [*GPT, *TIED, *SGD],
    "moe": [*SGD],
    "moe adamw zero 3 drops": [*ZERO_3, *ADAMW, *DROPS, *FULL],
    "v3 mla drops": [*MLA, *V3, *SGD, *DROPS, *SELECTIVE],
    "qwen3 mtp": [*QWEN3, *MTP, *SGD],
    "qwen2 surest drops": [*QWEN2, *SURE, *SGD],
    "compiled dense": [ON, *DENSE, *SGD],
    "compiled drops z-loss": [ON, *SGD, *DROPS, "knobs.z_loss_coef=0.1"],
}
_SCRIPTED = {
    "switched drops": ([*SGD, *DROPS], SWITCHED),
    "turned": ([*ADAMW], TURNED),
    "clipped": ([*SGD], CLIPPED),
    "zero switched": ([*SGD, *DROPS], ZEROED),
    "v3 weighed": ([*V3, *SGD], WEIGHED),
    "expert choice": ([*SGD, *EXPERT_CHOICE], {6: {"capacity_factor": 1.7}, 13: {"capacity_factor": 0.4}}),
    "compiled switched": ([ON, *SGD], SWITCHED),
}
_ROUNDED = {
    "fp32 drops": [*SGD, *DROPS],
    "fp32 documents": [*APART, *WIDE, *SGD],
    "fp32 window": [*WINDOW, *WIDE, *SGD, *FULL],
    "bf16 dense": [*BF16, *DENSE, *SGD],
    "bf16 moe": [*BF16, *SGD],
    "bf16 drops zero 3": [*BF16, *ZERO_3, *SGD, *DROPS, *FULL],
    "bf16 mla v3": [*BF16, *MLA, *V3, *SGD],
    "bf16 documents": [*BF16, *RESET, *WIDE, *SGD],
    "bf16 compiled": [*BF16, ON, *SGD],
    "fp16 moe": [*FP16, *SGD],
    "fp16 dense zero 3": [*FP16, *DENSE, *ZERO_3, *SGD],
}

ONE_RANK: dict[str, Case] = {
    **{f"one rank {name} fp64": Case([*SMALL, *overrides], fp64=True) for name, overrides in _FP64.items()},
    **{
        f"one rank {name} fp64": Case([*SMALL, *overrides], fp64=True, script=script)
        for name, (overrides, script) in _SCRIPTED.items()
    },
    **{f"one rank {name}": Case([*SMALL, *overrides]) for name, overrides in _ROUNDED.items()},
}
