"""The layouts of the parity tests, as overrides of the demo's layout: each axis alone, and combinations."""

from tests.ranks.cases.case import (
    ADAMW,
    BF16,
    CLIPPED,
    DROPS,
    FP16,
    FULL,
    SELECTIVE,
    SGD,
    SMALL,
    SWITCHED,
    TIED,
    TURNED,
    ZEROED,
    Case,
    alone,
)
from tests.ranks.cases.over_collectives import COLLECTIVES
from tests.ranks.cases.over_compiled import COMPILED
from tests.ranks.cases.over_cp import OVER_CP
from tests.ranks.cases.over_documents import DOCUMENTS
from tests.ranks.cases.over_experts import EXPERTS
from tests.ranks.cases.over_mixes import MIXES
from tests.ranks.cases.over_models import MODELS, OF_MINIS
from tests.ranks.cases.over_own_models import OWN_MODELS
from tests.ranks.cases.over_pipelines import PIPELINES
from tests.ranks.cases.over_routers import ROUTERS
from tests.ranks.token_shards import SHARDS

CASES: dict[str, Case] = {
    "demo adamw dropless": Case([*ADAMW]),
    "demo adamw drops": Case([*ADAMW, *DROPS]),
    "demo sgd dropless": Case([*SGD]),
    "demo sgd drops full": Case([*SGD, *DROPS, *FULL]),
    "demo adamw drops fp64": Case([*ADAMW, *DROPS], fp64=True),
    "demo sgd dropless full fp64": Case([*SGD, *FULL], fp64=True),
    "demo switched": Case([*SGD], script=SWITCHED),
    "demo drops switched fp64": Case([*SGD, *DROPS], fp64=True, script=SWITCHED),
    "demo turned": Case([*ADAMW], script=TURNED),
    "mix pp tp ep gpipe fp64": Case(
        [
            *SMALL,
            "grid.pp=2",
            "grid.tp=2",
            "grid.ep=2",
            "schedule.name=gpipe",
            "model.moe.balance=none",
            "train.weight_decay=0.1",
            *ADAMW,
        ],
        fp64=True,
    ),
    "mix pp dp tp fp64": Case(
        [
            *SMALL,
            "grid.pp=2",
            "grid.dp_shard=2",
            "grid.tp=2",
            "grid.ep=2",
            "train.zero=1",
            *SGD,
            *DROPS,
            *SELECTIVE,
        ],
        fp64=True,
    ),
    "mix pp dp tp drops switched fp64": Case(
        [
            *alone("grid.pp=2", "grid.dp_shard=2", "grid.tp=2", "grid.ep=4", "train.global_batch=32"),
            "knobs.micro_batches=4",
            *SGD,
            *DROPS,
        ],
        fp64=True,
        script=SWITCHED,
    ),
    "pp dp drops switched fp64": Case(
        [
            *alone("grid.pp=2", "grid.dp_shard=2", "grid.ep=2", "train.global_batch=32"),
            "knobs.micro_batches=4",
            *SGD,
            *DROPS,
        ],
        fp64=True,
        script=SWITCHED,
    ),
    "few experts top-1 fp64": Case(
        [*SMALL, "grid.dp_shard=4", "model.moe.experts=2", "model.moe.top_k=1", *SGD], fp64=True
    ),
    "tp 4 top-3 fp64": Case(
        [*SMALL, "grid.tp=4", "grid.ep=2", "model.kv_heads=4", "model.moe.top_k=3", *SGD, *DROPS], fp64=True
    ),
    "clipped live fp64": Case([*alone("grid.dp_shard=2", "grid.ep=2"), *SGD], fp64=True, script=CLIPPED),
    "pp": Case([*alone("grid.pp=2"), *SGD]),
    "dp": Case([*alone("grid.dp_shard=2"), *SGD]),
    "tp": Case([*alone("grid.tp=2"), *SGD]),
    "ep": Case([*alone("grid.dp_shard=2", "grid.ep=2"), *SGD]),
    "pp drops fp64": Case([*alone("grid.pp=2"), *ADAMW, *DROPS, *SELECTIVE], fp64=True),
    "pp gpipe fp64": Case([*alone("grid.pp=2", "schedule.name=gpipe"), *SGD], fp64=True),
    "pp uneven fp64": Case([*alone("grid.pp=2", "model.layers=3"), *SGD, *FULL], fp64=True),
    "pp zero 3 fp64": Case([*alone("grid.pp=2", "grid.dp_shard=2", "train.zero=3"), *SGD, *FULL], fp64=True),
    "zero 0 fp64": Case([*alone("train.zero=0"), *SGD], fp64=True),
    "dp zero 1 fp64": Case([*alone("grid.dp_shard=2", "train.zero=1"), *SGD], fp64=True),
    "replicas zero 0 fp64": Case([*alone("grid.dp_replicate=2", "train.zero=0"), *SGD], fp64=True),
    "replicas drops fp64": Case(
        [*alone("grid.dp_replicate=2", "train.zero=1"), *ADAMW, *DROPS, *FULL], fp64=True
    ),
    "hsdp zero 1 drops fp64": Case(
        [*alone("grid.dp_replicate=2", "grid.dp_shard=2", "grid.ep=2", "train.zero=1"), *SGD, *DROPS],
        fp64=True,
    ),
    "hsdp zero 2": Case([*alone("grid.dp_replicate=2", "grid.dp_shard=2"), *SGD]),
    "hsdp zero 3 fp64": Case(
        [*alone("grid.dp_replicate=2", "grid.dp_shard=2", "train.zero=3"), *SGD, *FULL],
        fp64=True,
    ),
    "mix hsdp tp ep drops fp64": Case(
        [
            *alone("grid.dp_replicate=2", "grid.dp_shard=2", "grid.tp=2", "grid.ep=4"),
            *SGD,
            *DROPS,
            *SELECTIVE,
        ],
        fp64=True,
    ),
    "mix pp hsdp drops fp64": Case(
        [*alone("grid.pp=2", "grid.dp_replicate=2", "grid.dp_shard=2", "grid.ep=2"), *SGD, *DROPS],
        fp64=True,
    ),
    "mix pp replicas tp fp64": Case(
        [
            *alone("grid.pp=2", "grid.dp_replicate=2", "grid.tp=2", "train.zero=0", "schedule.name=gpipe"),
            *ADAMW,
        ],
        fp64=True,
    ),
    "dp zero switched drops fp64": Case(
        [*alone("grid.dp_shard=2", "grid.ep=2"), *SGD, *DROPS], fp64=True, script=ZEROED
    ),
    "mix pp dp zero switched fp64": Case(
        [*alone("grid.pp=2", "grid.dp_shard=2", "train.zero=3"), *SGD], fp64=True, script=ZEROED
    ),
    "mix hsdp tp zero switched fp64": Case(
        [*alone("grid.dp_replicate=2", "grid.dp_shard=2", "grid.tp=2"), *SGD],
        fp64=True,
        script={at: {"zero": zeros["zero"]} for at, zeros in ZEROED.items()},
    ),
    "bf16 dense": Case([*alone(*BF16, "grid.dp_shard=2", "model.moe=none"), *SGD]),
    "mix bf16 pp dp tp dense": Case(
        [*alone(*BF16, "grid.pp=2", "grid.dp_shard=2", "grid.tp=2", "model.moe=none"), *SGD]
    ),
    "fp16 dp ep": Case([*alone(*FP16, "grid.dp_shard=2", "grid.ep=2"), *SGD]),
    "mix fp16 pp dp tp dense": Case(
        [*alone(*FP16, "grid.pp=2", "grid.dp_shard=2", "grid.tp=2", "model.moe=none"), *SGD]
    ),
    "fp16 replicas losses": Case(
        [*alone(*FP16, "grid.dp_replicate=2", "knobs.z_loss_coef=0.1", "knobs.aux_loss_coef=1.0"), *SGD]
    ),
    "bf16 hsdp zero 3": Case(
        [*alone(*BF16, "grid.dp_replicate=2", "grid.dp_shard=2", "train.zero=3"), *SGD, *FULL]
    ),
    "mix bf16 pp tp ep": Case([*alone(*BF16, "grid.pp=2", "grid.tp=2", "grid.ep=2"), *SGD]),
    "mix bf16 cp ring dense": Case([*alone(*BF16, "grid.cp=2", "model.moe=none"), *SGD]),
    "tied dp zero 3 fp64": Case([*alone("grid.dp_shard=2", "train.zero=3", *TIED), *SGD], fp64=True),
    "tied dp tp drops fp64": Case(
        [*alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=2", *TIED), *ADAMW, *DROPS],
        fp64=True,
    ),
    "dp drops fp64": Case([*alone("grid.dp_shard=2"), *ADAMW, *DROPS], fp64=True),
    "dp zero 3 fp64": Case([*alone("grid.dp_shard=2", "train.zero=3"), *SGD, *FULL], fp64=True),
    "tp drops fp64": Case([*alone("grid.tp=2"), *ADAMW, *DROPS, *FULL], fp64=True),
    "tp dense fp64": Case([*alone("grid.tp=2", "model.moe=none"), *SGD], fp64=True),
    "tp mixed fp64": Case([*alone("grid.tp=2", "grid.ep=2", "model.moe.every=2"), *SGD, *DROPS], fp64=True),
    "ep drops fp64": Case([*alone("grid.dp_shard=2", "grid.ep=2"), *ADAMW, *DROPS], fp64=True),
    "ep over tp fp64": Case([*alone("grid.tp=2", "grid.ep=2"), *SGD, *DROPS], fp64=True),
    "ep part fp64": Case([*alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=2"), *SGD, *DROPS], fp64=True),
    "shards dp ep drops fp64": Case(
        [*alone("grid.dp_shard=2", "grid.ep=2"), *ADAMW, *DROPS, *SHARDS], fp64=True
    ),
    "shards pp cp fp64": Case([*alone("grid.pp=2", "grid.cp=2"), *SGD, *SHARDS], fp64=True),
    "demo over cp drops switched fp64": Case(
        ["grid.dp_shard=1", "grid.cp=2", *SGD, *DROPS], fp64=True, script=SWITCHED
    ),
    "mix cp tp zero switched fp64": Case(
        [*alone("grid.cp=2", "grid.tp=2", "grid.ep=2"), *SGD], fp64=True, script=ZEROED
    ),
}
CASES |= (
    PIPELINES
    | ROUTERS
    | EXPERTS
    | COMPILED
    | MODELS
    | OF_MINIS
    | COLLECTIVES
    | DOCUMENTS
    | OWN_MODELS
    | MIXES
)
CASES |= {
    f"{name} fp64": Case([*SMALL, *overrides.split(), *SGD], fp64=True) for name, overrides in OVER_CP.items()
}

# Cases that `make test` runs: small cases that contain each axis, schedule, ZeRO stage, recompute mode and knob once.
QUICK = (
    "pp dp drops switched fp64",
    "dp",
    "mix pp tp ep gpipe fp64",
    "pp uneven fp64",
    "interleaved reordered fp64",
    "tied zbv reordered fp64",
    "cp ring fp64",
    "cp 4 ulysses drops fp64",
    "replicas zero 0 fp64",
    "dp zero switched drops fp64",
    "ep placed fp64",
    "v3 mix drops fp64",
    "bf16 dense",
    "fp16 dp ep",
    "qwen3 tp cp ring ep drops fp64",
    "mla wide values cp tp ring drops fp64",
    "shards dp ep drops fp64",
    "deepseek-v3-mini as it is fp64",
    "measured 3 replicas drops fp64",
    "gpt pp dp switched fp64",
)
# Cases that `make test-all` runs; `make parity` runs all cases.
TELLING = {
    name: CASES[name]
    for name in (
        *QUICK,
        "compiled one layer ep fp64",
        "compiled dp ep drops fp64",
        "mix pp dp tp drops switched fp64",
        "shards pp cp fp64",
        "demo switched",
        "demo drops switched fp64",
        "bf16 zbv ep",
        "few experts top-1 fp64",
        "v3 dense stage dp ep placed fp64",
        "expert choice mix fp64",
        "losses turned fp64",
        "clipped live fp64",
        "pp",
        "tp",
        "ep",
        "pp zero 3 fp64",
        "interleaved dp drops fp64",
        "interleaved zb fp64",
        "dualpipev tp ep drops fp64",
        "pp reordered fp64",
        "v reordered dp drops fp64",
        "mix hsdp tp ep drops fp64",
        "tied pp dp zero switched fp64",
        "tp mixed fp64",
        "ep part fp64",
        "ep two hops drops fp64",
        "mix pp cp tp ep drops fp64",
        "mix dp cp ep zero 3 drops fp64",
        "qwen3 tied pp dp zero 3 fp64",
        "biases pp tp dense fp64",
        "mla cp ulysses fp64",
        "mla v3 pp tp ep drops fp64",
        "mla v3 mix dp cp tp zero 3 fp64",
        "mla bf16 dp ep",
        "mtp fp64",
        "mtp dp zero 3 ep tied fp64",
        "mtp tp cp ring drops fp64",
        "mtp pp tp dp drops fp64",
        "documents pp cp ring mla v3 fp64",
        "window tp dp drops fp64",
        "parts interleaved zb tp fp64",
        "parts dp cp ulysses two hops drops fp64",
        "parts measured pp replicas mtp fp64",
        *(name for name in OWN_MODELS if name != "gpt pp dp switched fp64"),
        *(name for name in OF_MINIS if name != "deepseek-v3-mini as it is fp64"),
    )
}

STEPS = 20
AFTER_SCRIPT = 4  # number of steps that a quick case runs after the last proposal of its script
UNSCRIPTED = 8  # number of steps of a quick case without a script


def steps_of(name: str) -> int:
    """The number of steps to run for a case named on the command line. Cases in QUICK run fewer steps than STEPS."""
    if name not in QUICK:
        return STEPS
    script = CASES[name].script
    return max(script) + AFTER_SCRIPT if script else UNSCRIPTED
