"""Draws random legal layouts of small models, each from a seed: model parts, axes, schedules, data and knobs.

Each row of the tables lists alternative overrides, one of which is drawn. If the layout checks reject a combination,
another one is drawn, so this module does not repeat the rules of these checks.
"""

from random import Random

from engine.config.checks.trainable import untrained
from engine.config.refusal import LayoutError
from engine.config.schedule_traits import SCHEDULES, legal_recompute
from tests.ranks.cases.case import SMALL, Case, Script
from tests.ranks.cases.over_collectives import MEASURED
from tests.ranks.token_shards import SHARDS, SHORT

WORLDS = (2, 3, 4, 4, 4, 4, 6, 8)
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# axes that interact with most other settings are drawn more often
DRAWN = (
    "pp",
    "pp",
    "pp",
    *AXES,
    "cp",
    "tp",
)
TRIES = 5_000

# Each row: choices, as overrides separated by spaces; one is drawn. Empty: the default.
MODEL = [
    ("model.d_model=32 model.heads=4", "model.d_model=48 model.heads=6", "model.d_model=64 model.heads=8"),
    ("model.seq_len=32", "model.seq_len=48", "model.seq_len=64"),
    ("model.tie_embeddings=true", "", ""),
    ("model.rope_theta=500.0", ""),
    ("model.vocab=264", "model.vocab=256", "model.vocab=288"),
    ("model.mtp_layers=1", "model.mtp_layers=2", "", "", ""),
]
GQA = [
    ("model.kv_heads=none", "model.kv_heads=2", "model.kv_heads=1", "model.kv_heads=4"),
    ("model.head_dim=16", "", ""),
    ("model.qk_norm=true", ""),
    ("model.qkv_bias=true", "model.bias=true", "", ""),
    ("model.window=12", "model.window=7", "", "", ""),
]
MLA = [
    ("model.attention=mla model.kv_heads=none model.kv_rank=20 model.nope_dim=16 model.rope_dim=8",),
    ("model.q_rank=24", ""),
    ("model.v_dim=12", "model.v_dim=28", "model.v_dim=24"),
]
MOE = [
    ("model.moe.experts=4", "model.moe.experts=8"),
    ("model.moe.d_expert=48", "model.moe.d_expert=20"),
    ("model.moe.top_k=1", "model.moe.top_k=2", "model.moe.top_k=3"),
    ("model.moe.shared_experts=1", "model.moe.shared_experts=2", "", ""),
    ("model.moe.dense_layers=1", "", ""),
    ("model.moe.every=2", "", "", ""),
    ("model.moe.route_scale=2.5", ""),
    ("model.moe.score=sigmoid", ""),
    ("grid.ep_method=hierarchical", "", ""),
]
TOKEN_CHOICE = [
    (
        "model.moe.balance=bias knobs.bias_rate=0.02",
        "model.moe.balance=aux+bias",
        "model.moe.balance=none",
        "",
    ),
    ("model.moe.groups=2", "model.moe.groups=4 model.moe.top_groups=2", "", ""),
    ("knobs.capacity_factor=1.0", "knobs.capacity_factor=0.75", ""),
    ("model.moe.drop=probability", "", ""),
    ("knobs.aux_loss_coef=0.5", ""),
    ("knobs.z_loss_coef=0.1", "", ""),
]
EXPERT_CHOICE = [
    ("model.moe.router=expert_choice model.moe.balance=none",),
    ("knobs.capacity_factor=1.5", ""),
]
DENSE = [("model.moe=none",), ("model.d_ff=96", "model.d_ff=72")]
TRAIN = [
    ("train.optimizer=adamw", "train.optimizer=sgd train.lr=0.1", "train.optimizer=sgd train.lr=0.1"),
    ("train.zero=0", "train.zero=1", "train.zero=2", "train.zero=3", "train.zero=3"),
    ("train.grad_clip=0.5", ""),
    ("train.weight_decay=0.1", ""),
    ("train.lr_schedule=cosine", "train.lr_schedule=linear", "", ""),
    ("knobs.recompute=selective", "knobs.recompute=full", ""),
    ("grid.cp_method=ulysses", ""),
    (MEASURED, "", ""),
]
DATA = [
    " ".join([*SHORT, "data.separate_documents=true"]),
    " ".join([*SHORT, "data.separate_documents=true", "data.reset_positions=true"]),
    "data.source=text:layouts/**/*.toml data.separate_documents=true",
    " ".join(SHARDS).replace("[3.0, 1.0]", "[3.0,1.0]"),
    "",
    "",
]


def random_case(seed: int) -> Case:
    """The parity case drawn from a seed: a legal layout, in fp64, with at most 8 ranks."""
    random = Random(seed)
    for _ in range(TRIES):
        case = _draw(random)
        try:
            layout = case.layout
        except LayoutError:
            continue
        if layout.ranks.world > 1 and layout.train.global_batch <= 24 and not untrained(layout):
            return case
    raise AssertionError(f"seed {seed} gave no legal layout in {TRIES} tries")


def _draw(random: Random) -> Case:
    sizes = _axes(random)
    name = random.choice([*SCHEDULES] if sizes["pp"] > 1 else ["gpipe", "1f1b"])
    stages = sizes["pp"] * (SCHEDULES[name].virtual_stages or 2)
    micro_batches, extra = random.choice((1, 2, 2, 3, 4, 4, 6, 8)), random.choice((1, 1, 2))
    rows = [*MODEL, *(MLA if random.random() < 0.25 else GQA)]
    kind = random.random()
    if kind < 0.2:
        rows += DENSE
    else:
        rows += [*MOE, *(EXPERT_CHOICE if kind < 0.3 else TOKEN_CHOICE)]
    rows += TRAIN
    overrides = [
        *SMALL,
        *(f"grid.{axis}={size}" for axis, size in sizes.items()),
        f"model.layers={max(2, stages + random.choice((0, 0, 1, 2)))}",
        f"schedule.name={name}",
        f"knobs.micro_batches={micro_batches}",
        f"train.global_batch={sizes['dp_replicate'] * sizes['dp_shard'] * micro_batches * extra}",
        *(word for row in rows for word in random.choice(row).split()),
        *random.choice(DATA).split(),
    ]
    if kind >= 0.2:
        shared = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
        overrides.append(f"grid.ep={random.choice([n for n in range(1, shared + 1) if shared % n == 0])}")
    return Case(overrides, fp64=True, script=_script(random, name, token_choice=kind >= 0.3))


def _axes(random: Random) -> dict[str, int]:
    """Random sizes of the grid axes; their product, the number of ranks, is one of WORLDS."""
    world, sizes = random.choice(WORLDS), dict.fromkeys(AXES, 1)
    for factor in (2, 2, 2, 3):
        if world % factor == 0:
            world //= factor
            sizes[random.choice(DRAWN)] *= factor
    return sizes


def _script(random: Random, schedule: str, token_choice: bool) -> Script:
    """One knob change, proposed during the second step, or none."""
    changes: list[Script] = [
        {},
        {},
        {1: {"lr_scale": 0.5}},
        {1: {"recompute": random.choice(legal_recompute(schedule))}},
    ]
    if token_choice:
        changes.append({1: {"capacity_factor": random.choice((0.75, 1.25, None))}})
    return random.choice(changes)
