"""Defines `Case`, the class of parity cases, and what cases are built from: layout overrides, and lists of the knob
changes that an operator proposes at given steps."""

from dataclasses import dataclass, field
from pathlib import Path

from agents.protocol import Value
from engine.config.layout import Layout
from engine.config.toml import load
from tests.ranks.token_shards import in_folders

LAYOUT = Path(__file__).parents[3] / "layouts" / "demo.toml"

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
TIED = ["model.tie_embeddings=true"]
BF16 = ["train.precision=bf16"]
FP16 = ["train.precision=fp16", "loss_scale.initial=256.0"]

BIAS = ["model.moe.balance=bias", "knobs.bias_rate=0.02"]
GROUPS = ["model.moe.groups=4", "model.moe.top_groups=2", "model.moe.top_k=3"]
SURE = [*DROPS, "model.moe.drop=probability"]
SHARED = ["model.moe.shared_experts=2"]
EXPERT_CHOICE = ["model.moe.router=expert_choice", "model.moe.balance=none"]
# DEEPSEEK has the routing of DeepSeek-V3; V3 adds the two balancing methods, the scaling and the dense layer of
# DeepSeek-V3.
DEEPSEEK = [*BIAS, *GROUPS, *SHARED, "model.moe.score=sigmoid", "knobs.z_loss_coef=0.1"]
V3 = [
    *DEEPSEEK,
    "model.moe.balance=aux+bias",
    "knobs.aux_loss_coef=0.5",
    "model.moe.route_scale=2.5",
    "model.moe.dense_layers=1",
]


Script = dict[int, dict[str, Value]]
"""Step -> the change that an operator proposes while that step runs."""

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
    # Refused by one rank, which simulates that it has no memory for the move.
    1: {"expert_placement": "load"},
    4: {"expert_placement": "load"},
    7: {"expert_placement": "traffic"},
    10: {"expert_placement": "load"},
    13: {"expert_placement": "logical"},
}
CLIPPED: Script = {3: {"grad_clip": 0.25}, 8: {"grad_clip": None}, 12: {"grad_clip": 0.5}}

BALANCED: Script = {
    3: {"aux_loss_coef": 1.0, "z_loss_coef": 0.5},
    9: {"aux_loss_coef": 0.0},
    14: {"aux_loss_coef": 0.3, "z_loss_coef": 0.0},
}

WEIGHED: Script = {5: {"bias_rate": 0.2, "aux_loss_coef": 0.1}, 12: {"bias_rate": 0.0, "aux_loss_coef": 1.0}}
BIASED: Script = {5: {"bias_rate": 0.2}, 12: {"bias_rate": 0.0}}

REORDERED: Script = {
    2: {"schedule": "gpipe", "micro_batches": 1},
    4: {"schedule": "1f1b"},  # refused: it needs two micro-batches
    6: {"schedule": "1f1b", "micro_batches": 8},
    9: {"recompute": "full"},
}
REORDERED_LOOP: Script = {
    2: {"schedule": "interleaved_zb"},
    5: {"recompute": "full"},  # refused: the schedule has a split backward
    7: {"schedule": "interleaved", "recompute": "full", "micro_batches": 2},
    9: {"schedule": "interleaved_zb"},  # refused: it cannot recompute
    11: {"schedule": "interleaved_zb", "recompute": "none", "micro_batches": 1},
}
REORDERED_V: Script = {
    2: {"schedule": "dualpipev"},
    5: {"micro_batches": 2},  # refused: DualPipeV needs at least one micro-batch per stage
    8: {"schedule": "zbv", "micro_batches": 2},
    12: {"schedule": "dualpipev", "micro_batches": 4},
}


@dataclass(frozen=True)
class Case:
    """A parity case: a layout, and the knob changes that an operator proposes during the run. `of`: name of a layout
    file in layouts/, without `.toml`. `overrides`: the keys of this layout to change, with their new values."""

    overrides: list[str]
    fp64: bool = False
    script: Script = field(default_factory=dict)
    of: str = "demo"

    @property
    def layout(self) -> Layout:
        return load(LAYOUT.with_name(f"{self.of}.toml"), in_folders(self.overrides))


def alone(*axes: str) -> list[str]:
    return [*SMALL, *axes]
