"""The layouts that parity is proven for, as overrides of the demo's: each axis alone, and mixes."""

from dataclasses import dataclass, field
from pathlib import Path

from agents.wire import Value
from engine.layout import Layout, load
from tests.ranks import over_cp

LAYOUT = Path(__file__).parents[2] / "layouts" / "demo.toml"

SMALL = [
    "grid.pp=1",
    "grid.dp_shard=1",
    "grid.tp=1",
    "grid.ep=1",
    "model.layers=2",
    "model.seq_len=32",
    "model.d_model=32",
    "model.moe.d_expert=48",
    "train.global_batch=8",
    "train.warmup=2",
    "knobs.micro_batches=2",
]
ADAMW, SGD = ["train.optimizer=adamw"], ["train.optimizer=sgd", "train.lr=0.1", "train.warmup=4"]
DROPS, FULL, SELECTIVE = (
    ["knobs.capacity_factor=1.0"],
    ["knobs.recompute=full"],
    ["knobs.recompute=selective"],
)
ULYSSES = ["grid.cp_method=ulysses"]

TWO_HOPS = ["grid.ep_method=hierarchical"]
FOUR_STAGES = ["grid.pp=2", "model.layers=4", "knobs.micro_batches=4"]
INTERLEAVED, INTERLEAVED_ZB, ZBV, DUALPIPEV = (
    [*FOUR_STAGES, f"schedule.name={name}"] for name in ("interleaved", "interleaved_zb", "zbv", "dualpipev")
)
BF16 = ["train.precision=bf16"]

Script = dict[int, dict[str, Value]]
"""What an operator proposes while a step runs."""

SWITCHED: Script = {
    4: {"micro_batches": 8},
    7: {"micro_batches": 7},  # refused by the leader
    9: {"recompute": "full"},
    11: {"recompute": "none", "micro_batches": 16},  # refused by one rank's vote
    13: {"recompute": "selective", "micro_batches": 2},
}

TURNED: Script = {
    3: {"capacity_factor": 1.0},
    8: {"lr_scale": 0.5},
    12: {"capacity_factor": None, "lr_scale": 2.0},
}

ZEROED: Script = {
    3: {"zero": 3},
    6: {"zero": 1},
    9: {"zero": 2, "micro_batches": 4},
    12: {"zero": 3, "recompute": "full"},
    15: {"zero": 2},
}


PLACED: Script = {
    1: {"place": "load"},  # refused by one rank: it has no room
    4: {"place": "load"},
    7: {"place": "traffic"},
    10: {"place": "load"},
    13: {"place": "logical"},
}
CLIPPED: Script = {3: {"grad_clip": 0.25}, 8: {"grad_clip": None}, 12: {"grad_clip": 0.5}}

BALANCED: Script = {
    3: {"aux_loss_coef": 1.0, "z_loss_coef": 0.5},
    9: {"aux_loss_coef": 0.0},
    14: {"aux_loss_coef": 0.3, "z_loss_coef": 0.0},
}

BIASED: Script = {5: {"bias_rate": 0.2}, 12: {"bias_rate": 0.0}}

REORDERED: Script = {
    2: {"schedule": "gpipe", "micro_batches": 1},
    4: {"schedule": "1f1b"},  # refused: it needs two micro-batches
    6: {"schedule": "1f1b", "micro_batches": 8},
    9: {"recompute": "full"},
}
REORDERED_LOOP: Script = {
    2: {"schedule": "interleaved_zb"},
    5: {"recompute": "full"},  # refused: the backward comes in two parts
    7: {"schedule": "interleaved", "recompute": "full", "micro_batches": 2},
    9: {"schedule": "interleaved_zb"},  # refused likewise
    11: {"schedule": "interleaved_zb", "recompute": "none", "micro_batches": 1},
}
REORDERED_V: Script = {
    2: {"schedule": "dualpipev"},
    5: {"micro_batches": 2},  # refused: DualPipeV needs as many as there are stages
    8: {"schedule": "zbv", "micro_batches": 2},
    12: {"schedule": "dualpipev", "micro_batches": 4},
}


@dataclass(frozen=True)
class Case:
    """One layout, by its overrides of the demo's."""

    overrides: list[str]
    fp64: bool = False
    script: Script = field(default_factory=dict)
    telling: bool = True  # in `make test`; `make parity` runs all

    @property
    def layout(self) -> Layout:
        return load(LAYOUT, self.overrides)


def _alone(*axes: str) -> list[str]:
    return [*SMALL, *axes]


BIAS = ["model.moe.balance=bias", "knobs.bias_rate=0.02"]
GROUPS = ["model.moe.groups=4", "model.moe.top_groups=2", "model.moe.top_k=3"]
SURE = [*DROPS, "model.moe.drop=probability"]
SHARED = ["model.moe.shared_experts=2"]
EXPERT_CHOICE = ["model.moe.router=expert_choice", "model.moe.balance=none"]
# What DeepSeek-V3 puts together.
DEEPSEEK = [*BIAS, *GROUPS, *SHARED, "model.moe.score=sigmoid", "knobs.z_loss_coef=0.1"]

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
    "few experts top-1 fp64": Case(
        [*SMALL, "grid.dp_shard=4", "model.moe.experts=2", "model.moe.top_k=1", *SGD], fp64=True
    ),
    "tp 4 top-3 fp64": Case(
        [*SMALL, "grid.tp=4", "grid.ep=2", "model.kv_heads=4", "model.moe.top_k=3", *SGD, *DROPS], fp64=True
    ),
    "deepseek mix drops fp64": Case(
        [*SMALL, "grid.pp=2", "grid.tp=2", "grid.ep=2", *SGD, *DEEPSEEK, *SURE, *FULL], fp64=True
    ),
    "deepseek dp tp fp64": Case(
        [*SMALL, "grid.dp_shard=2", "grid.tp=2", "grid.ep=4", *SGD, *DEEPSEEK], fp64=True, script=BIASED
    ),
    "expert choice mix fp64": Case(
        [*SMALL, "grid.pp=2", "grid.tp=2", "grid.ep=2", *SGD, *EXPERT_CHOICE, *FULL],
        fp64=True,
        script={6: {"capacity_factor": 1.7}, 13: {"capacity_factor": 0.4}},
    ),
    "losses turned fp64": Case(
        [*_alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=2"), *SGD, *SURE], fp64=True, script=BALANCED
    ),
    "replicas bias fp64": Case(
        [*_alone("grid.dp_replicate=2", "grid.dp_shard=2"), *SGD, *BIAS], fp64=True, telling=False
    ),
    "tp groups fp64": Case([*_alone("grid.tp=2"), *SGD, *GROUPS], fp64=True, telling=False),
    "tp sigmoid fp64": Case(
        [*_alone("grid.tp=2"), *SGD, "model.moe.score=sigmoid", "knobs.aux_loss_coef=0.5"],
        fp64=True,
        telling=False,
    ),
    "tp bias fp64": Case([*_alone("grid.tp=2"), *SGD, *BIAS, *FULL], fp64=True, telling=False),
    "tp z-loss fp64": Case([*_alone("grid.tp=2"), *SGD, "knobs.z_loss_coef=0.5"], fp64=True, telling=False),
    "cp surest bias drops fp64": Case(
        [*_alone("grid.cp=2", "grid.tp=2"), *SGD, *BIAS, *SURE], fp64=True, telling=False
    ),
    "cp expert choice fp64": Case([*_alone("grid.cp=2", "grid.dp_shard=2"), *SGD, *EXPERT_CHOICE], fp64=True),
    "deepseek interleaved fp64": Case(
        [*_alone(*INTERLEAVED), "grid.tp=2", "grid.ep=2", *SGD, *DEEPSEEK], fp64=True, telling=False
    ),
    "deepseek placed drops fp64": Case(
        [*_alone("grid.dp_shard=2", "grid.ep=2"), *SGD, *DEEPSEEK, *SURE],
        fp64=True,
        script=PLACED,
        telling=False,
    ),
    "tp shared fp64": Case([*_alone("grid.tp=2"), *SGD, *SHARED, *SELECTIVE], fp64=True, telling=False),
    "tp expert choice fp64": Case([*_alone("grid.tp=2"), *SGD, *EXPERT_CHOICE], fp64=True, telling=False),
    "tp surest drops fp64": Case([*_alone("grid.tp=2"), *SGD, *SURE], fp64=True, telling=False),
    "dp ep surest drops fp64": Case(
        [*_alone("grid.dp_shard=2", "grid.ep=2"), *SGD, *SURE, "train.zero=3"], fp64=True, telling=False
    ),
    "clipped live fp64": Case([*_alone("grid.dp_shard=2", "grid.ep=2"), *SGD], fp64=True, script=CLIPPED),
    "pp": Case([*_alone("grid.pp=2"), *SGD]),
    "dp": Case([*_alone("grid.dp_shard=2"), *SGD]),
    "tp": Case([*_alone("grid.tp=2"), *SGD]),
    "ep": Case([*_alone("grid.dp_shard=2", "grid.ep=2"), *SGD]),
    "pp drops fp64": Case([*_alone("grid.pp=2"), *ADAMW, *DROPS, *SELECTIVE], fp64=True),
    "pp gpipe fp64": Case([*_alone("grid.pp=2", "schedule.name=gpipe"), *SGD], fp64=True),
    "pp uneven fp64": Case([*_alone("grid.pp=2", "model.layers=3"), *SGD, *FULL], fp64=True),
    "pp zero 3 fp64": Case([*_alone("grid.pp=2", "grid.dp_shard=2", "train.zero=3"), *SGD, *FULL], fp64=True),
    "interleaved fp64": Case([*_alone(*INTERLEAVED), *SGD], fp64=True),
    "interleaved dp drops fp64": Case([*_alone(*INTERLEAVED, "grid.dp_shard=2"), *SGD, *DROPS], fp64=True),
    "interleaved zero 3 fp64": Case(
        [*_alone(*INTERLEAVED, "grid.dp_shard=2", "train.zero=3"), *SGD, *FULL], fp64=True, telling=False
    ),
    "interleaved tp ep uneven fp64": Case(
        [
            *_alone(*INTERLEAVED, "model.layers=7", "schedule.virtual_stages=3", "grid.tp=2", "grid.ep=2"),
            *ADAMW,
            *SELECTIVE,
        ],
        fp64=True,
        telling=False,
    ),
    "interleaved zb fp64": Case([*_alone(*INTERLEAVED_ZB), *SGD], fp64=True),
    "interleaved zb dp drops fp64": Case(
        [
            *_alone(
                *INTERLEAVED_ZB, "grid.dp_shard=2", "grid.ep=2", "model.layers=7", "schedule.virtual_stages=3"
            ),
            *ADAMW,
            *DROPS,
        ],
        fp64=True,
        telling=False,
    ),
    "zbv fp64": Case([*_alone(*ZBV, "train.zero=1"), *SGD], fp64=True, telling=False),
    "zbv dp drops fp64": Case([*_alone(*ZBV, "grid.dp_shard=2", "model.layers=5"), *SGD, *DROPS], fp64=True),
    "zbv few micro-batches fp64": Case(
        [*_alone(*ZBV, "knobs.micro_batches=1"), *SGD], fp64=True, telling=False
    ),
    "zbv 4 ranks fp64": Case(
        [*_alone(*ZBV, "grid.pp=4", "model.layers=8", "knobs.micro_batches=8"), *SGD],
        fp64=True,
        telling=False,
    ),
    "dualpipev fp64": Case([*_alone(*DUALPIPEV, "knobs.micro_batches=8"), *SGD], fp64=True, telling=False),
    "dualpipev tp ep drops fp64": Case(
        [*_alone(*DUALPIPEV, "grid.tp=2", "grid.ep=2"), *SGD, *DROPS], fp64=True
    ),
    "dualpipev dp fp64": Case([*_alone(*DUALPIPEV, "grid.dp_shard=2"), *SGD], fp64=True, telling=False),
    "dualpipev 3 ranks dense fp64": Case(
        [*_alone(*DUALPIPEV, "grid.pp=3", "model.layers=6", "model.moe=none", "knobs.micro_batches=8"), *SGD],
        fp64=True,
        telling=False,
    ),
    "pp reordered fp64": Case([*_alone("grid.pp=2"), *SGD, *DROPS], fp64=True, script=REORDERED),
    "interleaved reordered fp64": Case(
        [*_alone(*INTERLEAVED), *SGD], fp64=True, script=REORDERED_LOOP, telling=False
    ),
    "v reordered dp drops fp64": Case(
        [*_alone(*ZBV, "grid.dp_shard=2"), *SGD, *DROPS], fp64=True, script=REORDERED_V
    ),
    "zbv heavy head dp drops fp64": Case(
        [*_alone(*ZBV, "grid.dp_shard=2", "model.layers=9", "model.vocab=1024"), *SGD, *DROPS],
        fp64=True,
        telling=False,
    ),
    "zero 0 fp64": Case([*_alone("train.zero=0"), *SGD], fp64=True),
    "dp zero 1 fp64": Case([*_alone("grid.dp_shard=2", "train.zero=1"), *SGD], fp64=True),
    "replicas zero 0 fp64": Case([*_alone("grid.dp_replicate=2", "train.zero=0"), *SGD], fp64=True),
    "replicas drops fp64": Case(
        [*_alone("grid.dp_replicate=2", "train.zero=1"), *ADAMW, *DROPS, *FULL], fp64=True, telling=False
    ),
    "hsdp zero 1 drops fp64": Case(
        [*_alone("grid.dp_replicate=2", "grid.dp_shard=2", "grid.ep=2", "train.zero=1"), *SGD, *DROPS],
        fp64=True,
        telling=False,
    ),
    "hsdp zero 2": Case([*_alone("grid.dp_replicate=2", "grid.dp_shard=2"), *SGD], telling=False),
    "hsdp zero 3 fp64": Case(
        [*_alone("grid.dp_replicate=2", "grid.dp_shard=2", "train.zero=3"), *SGD, *FULL],
        fp64=True,
        telling=False,
    ),
    "mix hsdp tp ep drops fp64": Case(
        [
            *_alone("grid.dp_replicate=2", "grid.dp_shard=2", "grid.tp=2", "grid.ep=4"),
            *SGD,
            *DROPS,
            *SELECTIVE,
        ],
        fp64=True,
    ),
    "mix pp hsdp drops fp64": Case(
        [*_alone("grid.pp=2", "grid.dp_replicate=2", "grid.dp_shard=2", "grid.ep=2"), *SGD, *DROPS],
        fp64=True,
        telling=False,
    ),
    "mix pp replicas tp fp64": Case(
        [
            *_alone("grid.pp=2", "grid.dp_replicate=2", "grid.tp=2", "train.zero=0", "schedule.name=gpipe"),
            *ADAMW,
        ],
        fp64=True,
        telling=False,
    ),
    "dp zero switched drops fp64": Case(
        [*_alone("grid.dp_shard=2", "grid.ep=2"), *SGD, *DROPS], fp64=True, script=ZEROED
    ),
    "mix pp dp zero switched fp64": Case(
        [*_alone("grid.pp=2", "grid.dp_shard=2", "train.zero=3"), *SGD], fp64=True, script=ZEROED
    ),
    "mix hsdp tp zero switched fp64": Case(
        [*_alone("grid.dp_replicate=2", "grid.dp_shard=2", "grid.tp=2"), *SGD],
        fp64=True,
        script={at: {"zero": zeros["zero"]} for at, zeros in ZEROED.items()},
        telling=False,
    ),
    "bf16 dense": Case([*_alone(*BF16, "grid.dp_shard=2", "model.moe=none"), *SGD]),
    "mix bf16 pp dp tp dense": Case(
        [*_alone(*BF16, "grid.pp=2", "grid.dp_shard=2", "grid.tp=2", "model.moe=none"), *SGD], telling=False
    ),
    "bf16 hsdp zero 3": Case(
        [*_alone(*BF16, "grid.dp_replicate=2", "grid.dp_shard=2", "train.zero=3"), *SGD, *FULL], telling=False
    ),
    "mix bf16 pp tp ep": Case([*_alone(*BF16, "grid.pp=2", "grid.tp=2", "grid.ep=2"), *SGD], telling=False),
    "mix bf16 cp ring dense": Case([*_alone(*BF16, "grid.cp=2", "model.moe=none"), *SGD], telling=False),
    "tied dp zero 3 fp64": Case(
        [*_alone("grid.dp_shard=2", "train.zero=3", "model.tie_embeddings=true"), *SGD], fp64=True
    ),
    "tied dp tp drops fp64": Case(
        [*_alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=2", "model.tie_embeddings=true"), *ADAMW, *DROPS],
        fp64=True,
        telling=False,
    ),
    "dp drops fp64": Case([*_alone("grid.dp_shard=2"), *ADAMW, *DROPS], fp64=True),
    "dp zero 3 fp64": Case([*_alone("grid.dp_shard=2", "train.zero=3"), *SGD, *FULL], fp64=True),
    "tp drops fp64": Case([*_alone("grid.tp=2"), *ADAMW, *DROPS, *FULL], fp64=True),
    "tp dense fp64": Case([*_alone("grid.tp=2", "model.moe=none"), *SGD], fp64=True),
    "tp mixed fp64": Case([*_alone("grid.tp=2", "grid.ep=2", "model.moe.every=2"), *SGD, *DROPS], fp64=True),
    "ep drops fp64": Case([*_alone("grid.dp_shard=2", "grid.ep=2"), *ADAMW, *DROPS], fp64=True),
    "ep over tp fp64": Case([*_alone("grid.tp=2", "grid.ep=2"), *SGD, *DROPS], fp64=True),
    "ep part fp64": Case([*_alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=2"), *SGD, *DROPS], fp64=True),
    "ep two hops drops fp64": Case(
        [*_alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=4"), *TWO_HOPS, *SGD, *DROPS], fp64=True
    ),
    "ep 8 two hops drops fp64": Case(
        [*_alone("grid.dp_shard=8", "grid.ep=8"), *TWO_HOPS, "knobs.micro_batches=1", *SGD, *DROPS, *FULL],
        fp64=True,
        telling=False,
    ),
    "pp ep two hops fp64": Case(
        [*_alone("grid.pp=2", "grid.dp_shard=4", "grid.ep=4", "grid.ep_inner=2"), *TWO_HOPS, *SGD],
        fp64=True,
        telling=False,
    ),
    "demo over cp drops switched fp64": Case(
        ["grid.dp_shard=1", "grid.cp=2", *SGD, *DROPS], fp64=True, script=SWITCHED, telling=False
    ),
    "mix cp tp placed drops fp64": Case(
        [*_alone("grid.cp=2", "grid.tp=2", "grid.ep=4"), *SGD, *DROPS],
        fp64=True,
        script=PLACED,
        telling=False,
    ),
    "mix cp tp zero switched fp64": Case(
        [*_alone("grid.cp=2", "grid.tp=2", "grid.ep=2"), *SGD], fp64=True, script=ZEROED, telling=False
    ),
    "ep placed fp64": Case([*_alone("grid.dp_shard=2", "grid.ep=2"), *ADAMW], fp64=True, script=PLACED),
    "pp ep placed drops fp64": Case(
        [*_alone("grid.pp=2", "grid.dp_shard=4", "grid.ep=2"), *ADAMW, *DROPS, *FULL],
        fp64=True,
        script=PLACED,
    ),
    "ep 4 placed fp64": Case(
        [*_alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=4"), *SGD, *TWO_HOPS],
        fp64=True,
        script=PLACED,
        telling=False,
    ),
    "ep part placed fp64": Case(
        [*_alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=2", "train.zero=3"), *SGD],
        fp64=True,
        script=PLACED,
        telling=False,
    ),
    "ep uneven shards placed fp64": Case(
        [*_alone("grid.dp_shard=8", "grid.ep=2", "model.moe.experts=6", "knobs.micro_batches=1"), *ADAMW],
        fp64=True,
        script=PLACED,
        telling=False,
    ),
    "interleaved placed fp64": Case(
        [*_alone(*INTERLEAVED, "grid.dp_shard=2", "grid.ep=2"), *ADAMW],
        fp64=True,
        script=PLACED,
        telling=False,
    ),
    "deepseek two hops placed drops fp64": Case(
        [*_alone("grid.dp_shard=2", "grid.tp=2", "grid.ep=4"), *TWO_HOPS, *SGD, *DEEPSEEK, *DROPS],
        fp64=True,
        script=PLACED,
        telling=False,
    ),
    "expert choice two hops fp64": Case(
        [*_alone("grid.dp_shard=4", "grid.ep=4"), *TWO_HOPS, *SGD, *EXPERT_CHOICE], fp64=True, telling=False
    ),
    "pp placed zero 1 fp64": Case(
        [*_alone("grid.pp=2", "grid.dp_shard=4", "grid.ep=2", "train.zero=1"), *ADAMW],
        fp64=True,
        script={**PLACED, 8: {"zero": 3}, 11: {"zero": 2}},
        telling=False,
    ),
    "replicas placed fp64": Case(
        [*_alone("grid.dp_replicate=2", "grid.dp_shard=2", "grid.ep=2"), *ADAMW],
        fp64=True,
        script=PLACED,
        telling=False,
    ),
}
CASES |= {
    f"{name} fp64": Case([*SMALL, *overrides.split(), *SGD], fp64=True, telling=name in over_cp.TELLING)
    for name, overrides in over_cp.OVER_CP.items()
}

TELLING = {name: case for name, case in CASES.items() if case.telling}
